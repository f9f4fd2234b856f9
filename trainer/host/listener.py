"""A port at which a rank can be asked how it is, and the asking: what answers when the collectives do not.

    listener = Listener(address, answer)        # a thread; the kernel picks the port
    ask(listener.told, stacks=False)            # on another host

Who answers lives. A connection that is accepted, by the kernel alone, and not answered: the process is
frozen. One that is refused: it is gone. None at all: its host is down, asleep or cut off.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

ASK_SECONDS = 3.0
BACKLOG = 1024  # connections to a frozen process pile up, and a full queue would look like a dead host
LONGEST_QUESTION = 4096

ANSWERS, FROZEN, GONE, UNREACHABLE = "answers", "frozen", "gone", "unreachable"


class Told(NamedTuple):
    """Where a rank can be asked; `secret` shows that it is the right one that asks or answers."""

    address: str
    port: int
    secret: str

    @classmethod
    def parse(cls, text: str) -> Told | None:
        try:
            address, port, secret = text.split(" ")
            return cls(address, int(port), secret)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.secret}"


class Answer(NamedTuple):
    """How a rank was found, and what it said if it did."""

    how: str
    said: dict[str, Any]


class Listener:
    """Answers on `address`, one question at a time, with what `answer(stacks)` returns."""

    def __init__(self, address: str, answer: Callable[[bool], dict[str, Any]]) -> None:
        """Raises OSError where the address is not this host's."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._answer = answer
        self.told = Told(address, int(self._socket.getsockname()[1]), secrets.token_hex(8))
        threading.Thread(target=self._work, name="listener", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not connected, which is so for every listener on some systems
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _work(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(ASK_SECONDS)
                question = json.loads(_read(connection, LONGEST_QUESTION))
                if secrets.compare_digest(str(question["secret"]), self.told.secret):
                    answer = {**self._answer(bool(question["stacks"])), "secret": self.told.secret[::-1]}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


def ask(told: Told, stacks: bool = False, seconds: float = ASK_SECONDS) -> Answer:
    """Ask the rank that listens there; takes `seconds` to connect and as many for the answer at most."""
    try:
        connection = socket.create_connection((told.address, told.port), timeout=seconds)
    except ConnectionRefusedError:
        return Answer(GONE, {})
    except OSError:
        return Answer(UNREACHABLE, {})
    with connection:
        try:
            connection.sendall(json.dumps({"secret": told.secret, "stacks": stacks}).encode() + b"\n")
            said = json.loads(_read(connection, 2**24))
            if said.pop("secret") != told.secret[::-1]:
                return Answer(GONE, {})
        except TimeoutError:
            return Answer(FROZEN, {})
        except (OSError, ValueError, KeyError, AttributeError):  # it ended meanwhile, or is another program
            return Answer(GONE, {})
    return Answer(ANSWERS, said)


def _read(connection: socket.socket, limit: int) -> bytes:
    """One line. Raises TimeoutError where it does not come, ValueError where it does not end."""
    parts: list[bytes] = []
    size = 0
    while size <= limit:
        part = connection.recv(65536)
        parts.append(part)
        size += len(part)
        if not part or part.endswith(b"\n"):
            return b"".join(parts)
    raise ValueError("too long")
