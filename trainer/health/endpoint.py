"""The health endpoint: a port at which a rank answers status queries while its collectives hang.

    endpoint = HealthEndpoint(address, answer)     # threads; the kernel picks the port
    query(endpoint.address, stacks=False)          # on another host

If the connection is accepted and no answer follows, the process is frozen: the kernel accepts for it. If the
connection is refused, the process has ended. If there is no connection, the host is down, asleep or cut off.

A query has two round trips. The first, of small packets, proves that the process runs. The second, with a
packet of full size each way, proves that such packets pass; a firewall or a tunnel may drop only those.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from trainer.health.diagnosis import EndpointResult
from trainer.health.status_record import RunStatusRecord

QUERY_SECONDS = 3.0
CLOSE_SECONDS = 0.1  # the longest that `close` waits
BACKLOG = 1024  # connections to a frozen process pile up, and a full queue would look like a dead host
MOST_CONNECTIONS = 64
LONGEST_LINE = 4096
LONGEST_ANSWER = 2**24
PADDING = "." * 2048  # more than a packet of 1500 bytes


class EndpointAddress(NamedTuple):
    """The address of a health endpoint.

    address: IP address. port: TCP port. secret: a text that both sides of a query must know.
    """

    address: str
    port: int
    secret: str

    @classmethod
    def parse(cls, text: str) -> EndpointAddress | None:
        """The address in `text`, which has the form "ADDRESS PORT SECRET"; None if it has another form."""
        try:
            address, port, secret = text.split(" ")
            return cls(address, int(port), secret) if 0 < int(port) < 65536 else None
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.address} {self.port} {self.secret}"


class Answer(NamedTuple):
    """The result of a query to a rank.

    result: how the query ended. status: the run status of the rank; empty if the rank did not answer.
    """

    result: EndpointResult
    status: RunStatusRecord = RunStatusRecord()


class HealthEndpoint(socketserver.ThreadingTCPServer):
    """A server that answers queries about this rank, in threads, until `close`.

    address: the EndpointAddress at which the rank answers. answer: function that is called for each query,
    perhaps by several threads at once. Its argument is whether the query asks for the stacks of all threads;
    it returns the run status. While MOST_CONNECTIONS connections have not sent the secret yet, a new
    connection closes the oldest of them.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, address: str, answer: Callable[[bool], RunStatusRecord]) -> None:
        """Start to answer, at a port that the kernel picks.

        address: IP address of this host. answer: see the class. Raises OSError if this host does not have
        `address`.
        """
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.answer = answer
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((address, 0), _Query)
        self.address = EndpointAddress(address, int(self.server_address[1]), secrets.token_hex(8))
        threading.Thread(
            target=self.serve_forever, args=(CLOSE_SECONDS,), name="health endpoint", daemon=True
        ).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no file descriptor left: the connection waits in the queue
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._unproven) >= MOST_CONNECTIONS:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then reads the end and closes it
            self._unproven[request] = None
        super().process_request(request, client_address)

    def proven(self, request: socket.socket) -> None:
        with self._lock:
            self._unproven.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.proven(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the exception: it has ended its own connection only."""


class _Query(socketserver.BaseRequestHandler):
    """Handles one query of a client. An exception closes the connection."""

    def handle(self) -> None:
        server, connection = cast(HealthEndpoint, self.server), self.request
        secret = server.address.secret
        deadline = time.monotonic() + QUERY_SECONDS
        request = json.loads(read_line(connection, LONGEST_LINE, deadline))
        if not secrets.compare_digest(str(request["secret"]).encode(), secret.encode()):
            return
        server.proven(connection)
        try:
            answer = server.answer(bool(request["stacks"])).message()
        except Exception as error:  # this is an answer too: the process runs
            answer = {"error": f"{type(error).__name__}: {error}"}
        send_line(connection, {"secret": secret[::-1]}, deadline)
        read_line(connection, LONGEST_LINE, deadline)
        send_line(connection, answer | {"padding": PADDING}, deadline)


def query(address: EndpointAddress, stacks: bool = False, seconds: float = QUERY_SECONDS) -> Answer:
    """Query the health endpoint at `address`.

    stacks: whether to also ask for the stacks of all threads. seconds: time limit for the connection, and
    again for the answer.
    """
    # A connection that closes early is tried again: an endpoint with too many connections closes one; and if
    # the process has just ended, the next connection is refused.
    for _ in range(2):
        if answer := _query_once(address, stacks, seconds):
            return answer
    return Answer(EndpointResult.REFUSES)


def _query_once(address: EndpointAddress, stacks: bool, seconds: float) -> Answer | None:
    """One try of `query`. None if the connection closed without an answer, or if another program answered."""
    result = EndpointResult.UNREACHABLE
    try:
        with socket.create_connection((address.address, address.port), timeout=seconds) as connection:
            result = EndpointResult.SILENT
            deadline = time.monotonic() + seconds
            send_line(connection, {"secret": address.secret, "stacks": stacks}, deadline)
            proof = json.loads(read_line(connection, LONGEST_LINE, deadline))
            if proof["secret"] != address.secret[::-1]:
                return None
            result = EndpointResult.CUT_SHORT
            send_line(connection, {"padding": PADDING}, deadline)
            values = json.loads(read_line(connection, LONGEST_ANSWER, deadline))
            return Answer(EndpointResult.ANSWERS, RunStatusRecord.load(values))
    except ConnectionRefusedError:
        return Answer(EndpointResult.REFUSES)
    except TimeoutError:
        return Answer(result)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # closed, or not a rank
        return Answer(result) if result == EndpointResult.UNREACHABLE else None


def send_line(connection: socket.socket, message: dict[str, Any], deadline: float) -> None:
    """Send `message` as a line of JSON.

    Raises TimeoutError if the line is not sent by `deadline`, a time of time.monotonic().
    """
    connection.settimeout(_seconds_left(deadline))
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket, limit: int, deadline: float) -> bytes:
    """Read a line; returns its bytes with the newline.

    After the line, the sender must wait for an answer: lines that arrive together are not separated.
    limit: nothing more is read after `limit` bytes. Blocks of up to 65,536 bytes are read, so the line can be
    longer than `limit` by that number. deadline: a time of time.monotonic(). Raises TimeoutError if the line
    has not arrived by then; ValueError if what was read does not end with a newline, because the line is too
    long or the connection was closed; OSError if the connection fails.
    """
    line = bytearray()
    while len(line) <= limit and not line.endswith(b"\n"):
        connection.settimeout(_seconds_left(deadline))
        part = connection.recv(65536)
        if not part:
            break
        line += part
    if not line.endswith(b"\n"):
        raise ValueError("too long, or closed before its end")
    return bytes(line)


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
