# SPDX-License-Identifier: MIT
"""The listener: a TCP server that answers network probes of other hosts. It echoes, counts or sends bytes.

A connection begins with one JSON line of the caller, {"token", "do", ...}. The token is a secret that the
listener and its callers share. The answer is one JSON line, {"host", "token", "seen"}: the name of the
listener's host, the same token, and the caller's address as the listener sees it. `do` decides what follows:

    hello   nothing more
    echo    the listener sends every byte back
    sink    the caller sends bytes until end of file; the listener answers {"bytes", "seconds"}
    source  the listener sends bytes for `seconds` seconds
    done    nothing more: the host that `from` names will not call again

A caller without the token gets no answer. The process ends on request, when all callers are done (if their
number is known), after IDLE_LIMIT seconds without a caller, or at its time limit. It writes no file. Standard
library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account

CHUNK = 1 << 18
LINE_LIMIT = 4096
NOBODY = 65534
IDLE_SECONDS = 10.0
"""Seconds that one connection may be silent."""
IDLE_LIMIT = 30.0
"""Seconds without a caller after which the listener ends, because its playbook was interrupted."""


def read_line(connection: socket.socket) -> dict[str, Any]:
    """Read one line from a socket; returns the JSON object in it.

    Single bytes are read, so that the bytes after the line stay in the socket. Raises ValueError if the
    connection sends no whole line of LINE_LIMIT bytes at most, or if the line has no JSON object; OSError if
    the connection fails.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > LINE_LIMIT:
            raise ValueError("the connection sent no line of JSON")
        line += byte
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("the line holds no JSON object")
    return value


def send_line(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send an object to a socket as one line of JSON."""
    connection.sendall(json.dumps(value).encode() + b"\n")


def family_of(address: str) -> socket.AddressFamily:
    """The address family of an IP address as text: AF_INET6 for IPv6, else AF_INET."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def plain(address: str) -> str:
    """`address` without the prefix ::ffff:, which an IPv4 address has on a dual-stack socket."""
    return address[7:] if address.startswith("::ffff:") else address


def control_name(token: str) -> str:
    """The name of the abstract Unix socket at which a listener process can be stopped.

    token: the secret of the listener and its callers; the name contains its first 16 characters.
    """
    return "\0nanofleet-doctor-" + token[:16]


class Listener:
    """The sockets on which a host answers the probes of its peers.

    host: the name of this host. token: the secret that the callers have to send. limit: seconds after which
    the listener ends. idle: seconds without a caller after which the listener ends. callers: the number of
    hosts that call it; 0 if that is not known. Raises OSError if a listener with the same token runs on this
    host.
    """

    def __init__(
        self, host: str, token: str, limit: float, idle: float = IDLE_LIMIT, callers: int = 0
    ) -> None:
        self.host, self.token, self.callers = host, token, callers
        self.done: set[str] = set()
        self.ends, self.idle = time.monotonic() + limit, idle
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.control.bind(control_name(token))
        self.sockets = [self.control]

    def open(self, address: str, port: int) -> int:
        """Listen on a TCP port; returns the port.

        address: the local address; "" for all. port: the port; 0: the kernel chooses one. Raises OSError if
        the port cannot be opened; its errno is EADDRINUSE if another process has the port.
        """
        everywhere = address == "" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere else family_of(address)
        opened = socket.create_server((address, port), family=family, backlog=64, dualstack_ipv6=everywhere)
        opened.setblocking(False)
        self.sockets.append(opened)
        return opened.getsockname()[1]

    def serve(self) -> None:
        """Answer callers until the listener has to end.

        It ends when `stop` is called with its token, when all callers are done, after `idle` seconds without
        a caller, or at the time limit.
        """
        called = time.monotonic()
        with contextlib.ExitStack() as closing:
            for each in self.sockets:
                closing.enter_context(each)
            while time.monotonic() < min(self.ends, called + self.idle):
                if self.callers and len(self.done) >= self.callers:
                    return
                for ready in select.select(self.sockets, [], [], 0.5)[0]:
                    called = time.monotonic()
                    if ready is self.control:
                        if ready.recv(LINE_LIMIT) == self.token.encode():
                            return
                        continue
                    with contextlib.suppress(BlockingIOError):
                        threading.Thread(target=self._answer, args=ready.accept(), daemon=True).start()

    def _answer(self, connection: socket.socket, peer: Any) -> None:
        connection.settimeout(IDLE_SECONDS)
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = read_line(connection)
            if asked.get("token") != self.token:
                return
            send_line(connection, {"host": self.host, "token": self.token, "seen": plain(peer[0])})
            if asked.get("do") == "done":
                self.done.add(str(asked["from"]))
            serve = {"echo": echo, "sink": sink, "source": source}.get(str(asked.get("do")))
            if serve:
                serve(connection, asked)


def open_ports(
    listener: Listener, address: str, store_port: int, ports: list[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Open the ports on which a run would listen. Returns (opened, held), two lists of dicts.

    listener: the listener that opens them. address: the address of this host; "" for all. store_port: port of
    the rendezvous store, which is opened on all addresses; 0 for none. ports: further ports. The kernel
    chooses one more port. opened: dicts with port, role (store or gloo) and picked (whether the kernel chose
    the port). held: dicts with port, role and reason, for ports that could not be opened.
    """
    wanted = [(0, "gloo", address), *((port, "gloo", address) for port in ports)]
    if store_port:
        # torch's store listens on all addresses.
        wanted.insert(0, (store_port, "store", ""))
    opened, held = [], []
    for port, role, where in wanted:
        try:
            opened.append({"port": listener.open(where, port), "role": role, "picked": port == 0})
        except OSError as error:
            reason = "held" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            held.append({"port": port, "role": role, "reason": reason})
    return opened, held


def echo(connection: socket.socket, _asked: dict[str, Any]) -> None:
    """Send every byte that arrives on a connection back to the caller."""
    while True:
        data = connection.recv(CHUNK)
        if not data:
            return
        connection.sendall(data)


def drain(connection: socket.socket) -> tuple[int, float]:
    """Read a socket to the end of file. Returns (number of bytes, seconds from the first byte to the end)."""
    buffer = memoryview(bytearray(CHUNK))
    count, first, last = 0, None, 0.0
    while True:
        got = connection.recv_into(buffer)
        last = time.monotonic()
        if not got:
            return count, (last - first if first is not None else 0.0)
        first = last if first is None else first
        count += got


def pour(connection: socket.socket, seconds: float) -> None:
    """Send zeros to a socket for `seconds` seconds, then end of file."""
    block, ends = bytes(CHUNK), time.monotonic() + seconds
    while time.monotonic() < ends:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def sink(connection: socket.socket, _asked: dict[str, Any]) -> None:
    """Read a connection to the end of file; then send the result of `drain` back as {"bytes", "seconds"}."""
    count, seconds = drain(connection)
    send_line(connection, {"bytes": count, "seconds": seconds})


def source(connection: socket.socket, asked: dict[str, Any]) -> None:
    """Send zeros to the caller for the `seconds` in its request, at most IDLE_SECONDS."""
    pour(connection, min(float(asked["seconds"]), IDLE_SECONDS))


def detach(listener: Listener, limit: float, user: str = "") -> int:
    """Start a process in which `listener` serves for at most `limit` + 1 seconds; returns its pid.

    The process outlives this one. user: if this process is root, the new process has the rights of this
    account, or of nobody if there is no such account; with "" it keeps the rights of root.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    server = os.fork()
    if server:
        return server
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit) + 1)
        os.chdir("/")
        if user and os.geteuid() == 0:
            drop_rights(user)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        listener.serve()
    finally:
        os._exit(0)


def drop_rights(user: str) -> None:
    """Give up root's rights for those of `user`, or of nobody if there is no such account."""
    entry = account(user)
    uid, gid = (entry.pw_uid, entry.pw_gid) if entry else (NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def stop(token: str) -> bool:
    """Stop the listener with this token on this host; returns whether there was such a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        try:
            control.sendto(token.encode(), control_name(token))
        except OSError:
            return False
    return True
