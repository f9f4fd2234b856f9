"""The health endpoint under bad input, idle and slow connections; a query to processes of every kind."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from trainer.health import endpoint as endpoint
from trainer.health.endpoint import EndpointAddress, HealthEndpoint, query
from trainer.health.status_record import RunStatusRecord

BAD = {
    "empty object": b"{}\n",
    "number": b"1\n",
    "list": b"[]\n",
    "null": b"null\n",
    "secret of another type": b'{"secret": [1], "stacks": 0}\n',
    "non-ASCII secret": '{"secret": "schlüssel", "stacks": false}\n'.encode(),
    "lone surrogate": b'{"secret": "\\ud800", "stacks": false}\n',
    "deeply nested": b"[" * 4000 + b"\n",
    "not UTF-8": b"\xff\xfe\n",
    "too long": b"x" * 10_000,
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
}


def state(stacks: bool) -> RunStatusRecord:
    return RunStatusRecord(phase="sync", stacks="..." if stacks else "")


@pytest.fixture(scope="module")
def rank() -> Iterator[HealthEndpoint]:
    listener = HealthEndpoint("127.0.0.1", state)
    yield listener
    listener.close()


def send(address: EndpointAddress, question: bytes) -> None:
    with socket.create_connection((address.address, address.port), timeout=10) as connection:
        connection.settimeout(10)
        with suppress(ConnectionError):  # a question that is too long is not read to its end
            connection.sendall(question)


def test_a_rank_answers_with_its_state() -> None:
    rank = HealthEndpoint("127.0.0.1", state)
    address = EndpointAddress.parse(str(rank.address))
    assert address == rank.address
    assert query(address) == ("answers", RunStatusRecord(phase="sync"))
    assert query(address, stacks=True).status.stacks == "..."
    assert query(address._replace(secret="0" * 16)).result == "refuses"
    rank.close()
    assert query(address).result == "refuses"


@pytest.mark.parametrize("question", BAD.values(), ids=BAD.keys())
def test_bad_input_ends_its_own_connection_only(rank: HealthEndpoint, question: bytes) -> None:
    send(rank.address, question)
    assert query(rank.address).result == "answers"


def test_ten_thousand_random_inputs_leave_the_rank_diagnosable(rank: HealthEndpoint) -> None:
    draw = random.Random(20)
    good = json.dumps({"secret": rank.address.secret, "stacks": True}).encode() + b"\n"

    def mutated() -> bytes:
        text = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.randrange(256)
        return bytes(text)

    kinds: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randint(0, 200)) + draw.choice([b"", b"\n"]),
        lambda: (
            json.dumps(draw.choice([1, None, [], {}, "x", {"secret": 5}, {"secret": "é"}])).encode() + b"\n"
        ),
        lambda: draw.choice([b"[", b'{"a":']) * draw.randint(1, 2000) + b"\n",
        lambda: good[: draw.randint(0, len(good))],
        mutated,
    ]
    for number in range(10_000):
        send(rank.address, draw.choice(kinds)())
        if number % 500 == 499:
            assert query(rank.address).result == "answers", f"after {number + 1} inputs"


def test_idle_connections_keep_nobody_from_an_answer(rank: HealthEndpoint) -> None:
    """Three times as many as the endpoint holds open: the oldest are closed."""
    with ExitStack() as idle:
        for _ in range(3 * endpoint.MOST_CONNECTIONS):
            idle.enter_context(socket.create_connection((rank.address.address, rank.address.port)))
        assert query(rank.address).result == "answers"
        waiting = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
        assert len(waiting) <= 2 * endpoint.MOST_CONNECTIONS  # one that is closed takes a moment to end


def test_a_connection_has_one_deadline_however_slowly_it_sends(
    rank: HealthEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "QUERY_SECONDS", 0.3)
    with socket.create_connection((rank.address.address, rank.address.port)) as slow:
        for _ in range(200):
            try:
                slow.sendall(b" ")
            except ConnectionError:
                return
            time.sleep(0.05)
    pytest.fail("open after 10 s")


# -- the other side of a query -----------------------------------------------------------------------------


@contextmanager
def process(*connections: Callable[[socket.socket], object]) -> Iterator[EndpointAddress]:
    """A process that treats its connections one after the other in these manners, the last one ever after."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        manners = list(connections)
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    (manners.pop(0) if len(manners) > 1 else manners[0])(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield EndpointAddress("127.0.0.1", server.getsockname()[1], "secret")
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def says(text: bytes) -> Callable[[socket.socket], object]:
    def manner(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(text)
        while text and connection.recv(4096):
            pass

    return manner


def drips(connection: socket.socket) -> None:
    while True:
        connection.sendall(b" ")
        time.sleep(0.01)


def proves_itself_and_answers(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b'{"secret": "terces"}\n')
    connection.recv(4096)
    connection.sendall(b'{"phase": "sync"}\n')
    connection.recv(4096)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]\n", b"1\n", b"{}\n", b"null\n", b"[" * 4000 + b"\n", b"\xff\n", b'{"secret": "other"}\n'],
)
def test_another_program_on_the_port_is_not_the_rank(text: bytes) -> None:
    with process(says(text)) as address:
        assert query(address).result == "refuses"


def test_a_query_ends_at_its_deadline_however_slowly_the_answer_comes() -> None:
    with process(drips) as address:
        assert query(address, seconds=0.3).result == "silent"


def test_a_process_that_only_the_kernel_accepts_for_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert (
            query(EndpointAddress("127.0.0.1", frozen.getsockname()[1], ""), seconds=0.3).result == "silent"
        )


def test_a_short_answer_without_the_long_one_is_cut_short() -> None:
    with process(says(b'{"secret": "terces"}\n')) as address:
        assert query(address, seconds=0.3).result == "cut short"


def test_a_connection_that_is_closed_early_is_tried_again() -> None:
    """As an endpoint with too many connections closes one."""
    with process(lambda connection: None, proves_itself_and_answers) as address:
        assert query(address) == ("answers", RunStatusRecord(phase="sync"))


@pytest.mark.parametrize("text", ["", "10.0.0.1 http secret", "10.0.0.1 99999 secret", "10.0.0.1 0 secret"])
def test_an_address_that_cannot_be_is_none(text: str) -> None:
    assert EndpointAddress.parse(text) is None
