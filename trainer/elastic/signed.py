"""Membership messages with signatures: only hosts with the fleet's secret change the members of a run.

    NONCE SIGNATURE VALUE    the text that SignedKeys writes to each key of the rendezvous store
    nonce                    the key that the coordinator writes first; VALUE is its run id and its term

The nonce is random and belongs to one attempt of the coordinator. A signature covers nonce, key and value, so
a message has no effect in another attempt or under another key. A message that changes the members also names
an incarnation or a generation (keys.py), which is compared with the current one. Counters are not signed, nor
are the messages by which the ranks of a view connect their process group.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from trainer.config import ConfigError
from trainer.elastic.keys import Keys
from trainer.outcome import Final, Retryable

VARIABLE = "NANOFLEET_SECRET_FILE"
SECRET_BYTES = 32
NONCE_SECONDS = 45.0  # from the start of the store until the coordinator has written the nonce
POLL_SECONDS = 0.05
# Keys that end in the number of the rank that writes them.
OF_A_RANK = ("join", "leave", "ready", "accepted", "connecting")


def read_secret() -> bytes:
    """The secret of the fleet, from the file that NANOFLEET_SECRET_FILE names; b"" without that variable.

    Raises ConfigError if the file cannot be read or does not contain a valid secret.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        return b""
    problem = f"it does not have {2 * SECRET_BYTES} hexadecimal digits"
    try:
        secret = bytes.fromhex(Path(path).read_text(encoding="ascii"))
        problem = "" if len(secret) == SECRET_BYTES else problem
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError:
        pass  # `problem` is that of any other content
    if problem:
        raise ConfigError(
            f"The secret of the fleet, {path}, cannot be used: {problem}. Write it again: "
            "ansible-playbook setup.yml"
        )
    return secret


def sign(secret: bytes, nonce: str, key: str, value: str) -> str:
    """The signature (HMAC-SHA256, hex digits) of `value` under `key` in the attempt with `nonce`."""
    text = json.dumps([nonce, key, value]).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def is_signed(secret: bytes, message: list[str], key: str) -> bool:
    """Whether a message at `key` is signed with `secret`. message: [nonce, signature, value]."""
    nonce, signature, value = message
    return hmac.compare_digest(signature.encode(), sign(secret, nonce, key, value).encode())


def split(text: str) -> list[str]:
    """[nonce, signature, value] from the text at a key; three "" if the text is not a signed message."""
    parts = text.split(" ", 2)
    return parts if len(parts) == 3 else ["", "", ""]


class SignedKeys:
    """Keys whose values are signed. A value without a valid signature is treated as not set.

    keys: reads and writes the signed texts in the rendezvous store. secret: the secret of the fleet. nonce:
    the nonce of this attempt of the coordinator. report: function of (key, message), called once for each key
    whose value is invalid. The counters incarnation/NUMBER and requests (keys.py) are not signed. A host
    without the secret that changes a counter can keep a process from becoming a member, as can any host that
    can write to the store, but cannot make a process a member.
    """

    def __init__(self, keys: Keys, secret: bytes, nonce: str, report: Callable[[str, str], None]) -> None:
        self._keys, self._secret, self._nonce, self._report = keys, secret, nonce, report
        self._reported: set[str] = set()

    @classmethod
    def announce(
        cls, keys: Keys, secret: bytes, run_id: str, report: Callable[[str, str], None], term: str = ""
    ) -> SignedKeys:
        """The keys of the coordinator, which has just opened the store.

        Writes a new signed nonce to the store. keys, secret, report: as for the class. run_id: id of the run.
        term: the term for which the coordinator was elected, as text; "" without an election.
        """
        signed = cls(keys, secret, secrets.token_hex(16), report)
        signed.set("nonce", f"{run_id} {term}".rstrip())
        return signed

    @classmethod
    def accept(
        cls,
        keys: Keys,
        secret: bytes,
        run_id: str,
        number: int,
        report: Callable[[str, str], None],
        seconds: float = NONCE_SECONDS,
        term: str = "",
    ) -> SignedKeys:
        """The keys of a rank other than the coordinator. Waits for the coordinator's nonce and verifies it.

        keys, secret, report: as for the class. run_id: id of the run. number: the number of this rank (see
        keys.py). seconds: the longest wait. term: the term in which this host takes part, as text; "" without
        an election. Raises Final if the coordinator has another secret or another run; Retryable if the
        coordinator writes no nonce in time, or is in another term.
        """
        began = time.monotonic()
        while not (text := keys.get("nonce")):
            if time.monotonic() - began > seconds:
                raise Retryable(
                    "The rendezvous store answers, but the coordinator has not written its first message "
                    f"to it within {seconds:.0f} s. Its rank hangs, or it has another version of "
                    "nanofleet. To see the state of the ranks: ansible-playbook status.yml"
                )
            time.sleep(POLL_SECONDS)
        message = split(text)
        signed = cls(keys, secret, message[0], report)
        if not is_signed(secret, message, "nonce"):
            signed.set(f"join/{number}", "")  # has no effect, and the coordinator reports it
            raise Final(
                "This host may not join the run: the coordinator has another secret. This host serves "
                "another fleet, or one of the two was set up again. Give all hosts the same secret: "
                "ansible-playbook setup.yml"
            )
        theirs, _, its_term = message[2].partition(" ")
        if theirs != run_id:
            raise Final(
                f"The coordinator trains the run {theirs}, not {run_id}, so this host does not train. To "
                f"train {run_id} instead: ansible-playbook stop.yml -e run_id={theirs}, then: "
                f"ansible-playbook train.yml -e run_id={run_id}"
            )
        if its_term != term:
            raise Retryable(
                f"The coordinator was elected in term {its_term or '-'}, but this host takes part in term "
                f"{term or '-'} (the number grows with each election): another coordinator was elected "
                "meanwhile. No action is needed: the rank restarts and follows the elected coordinator."
            )
        return signed

    def over(self, keys: Keys) -> SignedKeys:
        """The same signed keys over another connection to the store, for another thread."""
        other = SignedKeys(keys, self._secret, self._nonce, self._report)
        other._reported = self._reported
        return other

    def set(self, key: str, value: str) -> None:
        self._keys.set(key, f"{self._nonce} {sign(self._secret, self._nonce, key, value)} {value}")

    def get(self, key: str) -> str:
        text = self._keys.get(key)
        if not text:
            return ""
        message = split(text)
        if message[0] == self._nonce and is_signed(self._secret, message, key):
            return message[2]
        if key not in self._reported:
            self._reported.add(key)
            self._report(key, self._explain(key, message))
        return ""

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(key, amount)

    def _explain(self, key: str, message: list[str]) -> str:
        name, _, number = key.rpartition("/")
        writer = f" of rank {number}" if name.partition("/")[0] in OF_A_RANK else ""
        if message[0] != self._nonce and is_signed(self._secret, message, key):
            return (
                f"The membership message {key}{writer} has no effect: it was written for another attempt. "
                "A process of that attempt may still be active on a host, or somebody repeats what it wrote. "
                "If it appears again: ansible-playbook stop.yml, then start the run again"
            )
        who = f"The host{writer}" if writer else "A host"
        return (
            f"The membership message {key} has no effect: it is not signed with the secret of this fleet. "
            f"{who} has another secret, or a host that is not of the fleet wrote it. Give all hosts the same "
            "secret: ansible-playbook setup.yml"
        )
