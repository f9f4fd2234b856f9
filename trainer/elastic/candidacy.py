"""How this host takes part in elections of a coordinator: its messages, and the file that keeps its term.

A term is the time under one coordinator; it has a number that grows with each election (election.py).

    candidacy = Candidacy(env, run_file, run_dir, log)     # a port, and a thread for each other host
    env = candidacy.elect()                                # waits until a coordinator is elected
    candidacy.newer_term                                   # later: whether another coordinator is elected
    env = candidacy.elect()                                # again, after the coordinator was lost

All hosts answer at the same port number. The coordinator opens its rendezvous store at another port, which
the kernel picks, and names it in its answers. A connection carries three lines of JSON:

    {"nonce"}                          from the host that answers
    {"nonce", "notice", "signature"}   from the host that asks
    {"notice", "signature"}            the answer

One rank of each host votes: the first one, which keeps the term of the host on the disk. Other ranks of the
host, and those of a host that was added to an active run, have no vote: they only ask who coordinates.

A signature (HMAC-SHA256, with the secret of the fleet) covers both nonces, which are random, so a message
that is repeated later has no effect. It also covers the run id and the names of the hosts.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from trainer.config import ConfigError, RunFile
from trainer.data.files import write_json
from trainer.distributed.rendezvous import open_tcp_store
from trainer.elastic.election import NONE, Elected, Election, Notice
from trainer.elastic.signed import read_secret
from trainer.formatting import duration
from trainer.health.endpoint import BACKLOG, read_line, send_line
from trainer.health.run_status import RunStatus
from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable

TERM = "term.json"
ASK_SECONDS = 0.1  # between two questions to a host during an election
WATCH_SECONDS = 2.0  # and afterwards, by the coordinator
ANSWER_SECONDS = 2.0
FIRST_SECONDS = 45.0  # for the first election of a run, which a person waits for
LATER_SECONDS = 600.0  # for a later one; then the unit counts an attempt without progress, and starts another
REPORT_SECONDS = 5.0  # of an election, until the log names what is missing
REMIND_SECONDS = 60.0
LONGEST_LINE = 16384
PORT_SECONDS = 10.0  # for the process of the last attempt to close its port


class Candidacy:
    """Takes part for this host in elections of a coordinator: threads ask the other hosts and answer them.

    election: the present or last election, with the messages (notices) of the other hosts.
    quorum: the number of hosts that a coordinator needs, its own included.
    is_first: whether this host knew of no term of the run when the election began.
    store: the rendezvous store, if this host is the coordinator; else None.
    electors: on the coordinator, indices of its own host and of the hosts that could connect to it when it
        was elected.
    """

    def __init__(self, env: RankEnv, run_file: RunFile, run_dir: Path, log: RunLogger) -> None:
        """Start to ask the other hosts, and to answer them at the port `env.master_port`.

        A rank without a vote only asks. env: environment of this rank at launch, with the addresses of all
        hosts. run_file: the run file. run_dir: the run directory, in which term.json keeps the term. log: the
        logger of this rank. Raises Retryable if the port is in use or this host does not have its address;
        ConfigError if the secret of the fleet or term.json cannot be read.
        """
        self._env, self._run_file, self._path, self._log = env, run_file, run_dir / TERM, log
        hosts = len(env.addresses)
        self._me = env.host_index if env.has_vote else hosts  # which is no index of a host
        self.is_first = True
        self.quorum = run_file.config.quorum(hosts)
        self._signer = Signer(read_secret(), run_file)
        self.election = self._election(read_term(self._path, run_file.hosts))
        self.store: dist.TCPStore | None = None
        self.electors: tuple[int, ...] = ()
        self._closed = threading.Event()
        self._electing = threading.Event()
        self._electing.set()
        self._server = self._open() if env.has_vote else None
        for host in range(hosts):
            if host != self._me:
                threading.Thread(target=self._ask, args=(host,), name="election", daemon=True).start()

    def _election(self, term: int) -> Election:
        return Election(self._me, len(self._env.addresses), self.quorum, term)

    def _open(self) -> _Server:
        address, port = self._env.addresses[self._me], self._env.master_port
        deadline = time.monotonic() + PORT_SECONDS
        while True:
            try:
                return _Server(address, port, self)
            except OSError as error:
                if time.monotonic() > deadline:
                    fix = (
                        f"To see which program has the port, on {self._env.host}: sudo ss -tlnp "
                        f"'sport = :{port}'"
                    )
                    if error.errno == errno.EADDRNOTAVAIL:
                        fix = (
                            "The host had this address when the run was started. Give it the address again, "
                            "or correct the inventory; then: ansible-playbook train.yml"
                        )
                    raise Retryable(
                        f"{self._env.host} cannot listen at {address}:{port}: {error.strerror}. {fix}"
                    ) from None
                time.sleep(0.2)

    def close(self) -> None:
        """End the threads and close the port. A process that ends need not call this."""
        self._closed.set()
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    @property
    def newer_term(self) -> bool:
        """Whether this host has learned of a term after its own: another coordinator has been elected."""
        return self.election.known > self.election.term

    @property
    def first_name(self) -> str:
        """The name of the first host of the run."""
        return self._name(0)

    def expected(self) -> list[int] | None:
        """On the coordinator, the ranks to wait for before its first view (agreement.py).

        These are the ranks of the hosts in `electors`. None, for all ranks, in the first election of a run.
        """
        if self.is_first:
            return None
        hosts, ranks = len(self._env.addresses), self._env.local_world_size
        places = [(host - self._me) % hosts for host in self.electors]
        return [place * ranks + local for place in places for local in range(ranks)]

    def elect(self, is_silent: bool = False) -> RankEnv:
        """Wait until the hosts have elected a coordinator; returns the environment of this rank under it.

        In this environment rank 0 is on the host of the coordinator. On the coordinator, the attribute
        `store` is then open. Call this again when the coordinator is lost or replaced. is_silent: whether
        the last coordinator was silent for so long that the election need not wait for its answer. Raises
        Retryable if no host is elected within FIRST_SECONDS, or within LATER_SECONDS if the run had a
        coordinator before.
        """
        if self.election.is_over:
            self.store, self.electors = None, ()
            before, election = self.election, self._election(self.election.term)
            election.known = before.known
            if is_silent:
                election.lost(before.coordinator)
            self.election = election
            self._electing.set()
        began = reported = time.monotonic()
        wait, status = REPORT_SECONDS, None
        self.is_first = self.election.known == NONE
        while not (elected := self._decide()):
            time.sleep(ASK_SECONDS / 2)
            now = time.monotonic()
            if now - began > (FIRST_SECONDS if self.election.known == NONE else LATER_SECONDS):
                raise Retryable(self._missing())
            if now - reported > wait:
                reported, wait = now, REMIND_SECONDS
                text = f"{self._missing()} Waiting for {duration(now - began)}."
                self._log.warning(text, extra=fields("election", reached=self.election.reached()))
                status = status or self._publish()
                status.update(warning=self._missing())
        self._electing.clear()
        self._keep(elected)
        if status:
            status.stop()
        env = self._env.coordinated_by(elected.host, elected.port)
        if elected.host == self._me:
            self.electors = tuple(self.election.seen())
            self.store = open_tcp_store(env, is_master=True)
            env = dataclasses.replace(env, master_port=self.store.port)
            self.election.port = env.master_port
        for path in self._path.parent.glob("heartbeat-*[0-9].json"):
            number = int(path.stem.rpartition("-")[2])
            if number != env.rank and number % env.local_world_size == env.local_rank:
                path.unlink(missing_ok=True)  # of a rank that this process had before
        name = self._name(elected.host)
        text = f"{name} coordinates the run in term {elected.term}."
        self._log.info(text, extra=fields("elected", term=elected.term, coordinator=name))
        return env

    def _decide(self) -> Elected | None:
        """The elected coordinator; None while there is none.

        A rank that is not the first of its host gets the coordinator of the term in term.json, which the
        first rank writes.
        """
        is_first = self._env.is_host_leader
        return self.election.decide(None if is_first else read_term(self._path, self._run_file.hosts))

    def _publish(self) -> RunStatus:
        """Start to write a run status of this rank during a long election; returns the run status."""
        status = RunStatus(self._path.parent, self._env, self._run_file.run_id)
        status.start()
        return status

    def _keep(self, elected: Elected) -> None:
        """On the first rank of the host, write the term of `elected` to term.json.

        Raises Retryable if the file cannot be written: this host then does not take part in the term.
        """
        if not self._env.is_host_leader:
            return
        try:
            content = {"term": elected.term, "coordinator": self._name(elected.host)}
            write_json(self._path, {**content, "hosts": self._run_file.hosts})
        except OSError as error:
            raise Retryable(
                f"{self._path} cannot be written: {error.strerror}. Without it {self._env.host} cannot take "
                "part in the run: free space on its disk, or check its permissions."
            ) from None

    def _missing(self) -> str:
        """A sentence about the hosts that answer and those that are needed."""
        reached = self.election.reached()
        absent = [name for host, name in enumerate(self._run_file.hosts) if host not in reached]
        first = self.first_name
        if self.election.known == NONE and first in absent:
            return (
                f"{self._env.host} gets no answer from {first} at port {self._env.master_port}, and the run "
                f"cannot start without {first}, its first coordinator. Either the unit on {first} is not "
                "active (ansible-playbook status.yml), or a firewall closes the port (ansible-playbook "
                "doctor.yml)."
            )
        found = (
            f"{self._env.host} reaches all hosts, but no host is reached by {self.quorum} of them yet (to "
            "find the broken path: ansible-playbook doctor.yml)"
        )
        if absent:
            port = self._env.master_port
            found = f"{self._env.host} gets no answer from {', '.join(absent)} at port {port}"
        return (
            f"No coordinator is elected: {self.quorum} of {len(self._env.addresses)} hosts are needed, and "
            f"{found}. The run continues by itself when enough hosts are back."
        )

    def _name(self, host: int) -> str:
        return self._run_file.hosts[host] if self._run_file.hosts else self._env.addresses[host]

    # -- the threads -----------------------------------------------------------------------------------

    def _ask(self, host: int) -> None:
        """Ask the host with this index repeatedly: during an election and, on the coordinator, after it."""
        while not self._closed.wait(ASK_SECONDS):
            self._electing.wait(WATCH_SECONDS)
            election = self.election
            if not election.is_over or election.port:
                try:
                    election.answered(self._ask_once(host))
                except ConnectionRefusedError:
                    election.lost(host)
                except (OSError, ValueError, TypeError, LookupError):
                    pass

    def _ask_once(self, host: int) -> Notice:
        """Ask the host with this index once; returns the notice in its answer.

        Raises OSError if the connection fails; ValueError, TypeError or LookupError if the answer is
        malformed, its signature is wrong, or another host has answered.
        """
        address = self._env.addresses[host], self._env.master_port
        deadline = time.monotonic() + ANSWER_SECONDS
        with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:
            theirs, mine = str(_read(connection, deadline)["nonce"]), secrets.token_hex(16)
            notice = dataclasses.asdict(self.election.notice())
            signature = self._signer.sign("ask", theirs, mine, notice)
            send_line(connection, {"nonce": mine, "notice": notice, "signature": signature}, deadline)
            found = Notice.load(self._signer.verified("answer", mine, theirs, _read(connection, deadline)))
        if found.host != host:
            raise ValueError("another host has answered")
        return found

    def answer(self, connection: socket.socket) -> None:
        """Answer another host that has opened `connection` to ask this one.

        Raises OSError if the connection fails; ValueError, LookupError or TypeError if the message is
        malformed or its signature is wrong.
        """
        deadline, mine = time.monotonic() + ANSWER_SECONDS, secrets.token_hex(16)
        send_line(connection, {"nonce": mine}, deadline)
        message = _read(connection, deadline)
        theirs = str(message["nonce"])
        notice = Notice.load(self._signer.verified("ask", mine, theirs, message))
        if notice.host in range(len(self._env.addresses)) and notice.host != self._me:
            self.election.asked(notice)
        own = dataclasses.asdict(self.election.notice())
        signature = self._signer.sign("answer", theirs, mine, own)
        send_line(connection, {"notice": own, "signature": signature}, deadline)


class Signer:
    """Signs and verifies the notices that the hosts of a run exchange in an election.

    secret: the secret of the fleet. run_file: the run file; each signature covers its run_id and hosts.
    """

    def __init__(self, secret: bytes, run_file: RunFile) -> None:
        self._secret, self._context = secret, [run_file.run_id, *run_file.hosts]

    def sign(self, kind: str, first: str, second: str, notice: dict[str, Any]) -> str:
        """The signature of a message, as hex digits.

        kind: "ask" or "answer". first, second: the nonces of the receiver and of the sender. notice: fields
        of the Notice in the message.
        """
        text = json.dumps([self._context, kind, first, second, notice], sort_keys=True).encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def verified(self, kind: str, first: str, second: str, message: dict[str, Any]) -> dict[str, Any]:
        """The fields of the Notice in `message`, after a check of the signature.

        message: has the keys notice and signature. kind, first, second: as for `sign`. Raises ValueError if
        the signature is wrong.
        """
        notice = dict(message["notice"])
        expected = self.sign(kind, first, second, notice)
        if not hmac.compare_digest(str(message["signature"]).encode(), expected.encode()):
            raise ValueError("a message is not signed with the secret of this fleet")
        return notice


class _Server(socketserver.ThreadingTCPServer):
    """Answers the other hosts at an IP address and port of this host.

    Raises OSError if the port is in use or this host does not have the address.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, address: str, port: int, candidacy: Candidacy) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.candidacy = candidacy
        super().__init__((address, port), _Question)
        threading.Thread(target=self.serve_forever, name="election", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the exception: it has ended its own connection only."""


class _Question(socketserver.BaseRequestHandler):
    """Handles the question of one host. An exception closes the connection."""

    def handle(self) -> None:
        cast(_Server, self.server).candidacy.answer(self.request)


def _read(connection: socket.socket, deadline: float) -> dict[str, Any]:
    return dict(json.loads(read_line(connection, LONGEST_LINE, deadline)))


def read_term(path: Path, hosts: Sequence[str]) -> int:
    """The term in the file `path`, a term.json; NONE if there is no file.

    hosts: names of the hosts of the run. If the file was written for other hosts, the result is the lowest
    term, not below that in the file, whose coordinator is the first of `hosts`. Raises ConfigError if the
    file is damaged or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        term = int(content["term"])
        return term if content["hosts"] == list(hosts) else term + -term % len(hosts)
    except FileNotFoundError:
        return NONE
    except (OSError, ValueError, TypeError, LookupError):
        raise ConfigError(
            f"{path} is damaged or cannot be read. The file ensures that this host does not vote twice in "
            "one election, so stop the run before you remove it: ansible-playbook stop.yml, then on this "
            f"host: sudo rm {path}, then start the run again: ansible-playbook train.yml"
        ) from None
