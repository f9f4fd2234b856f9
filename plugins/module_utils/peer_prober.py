# SPDX-License-Identifier: MIT
"""Probes the path to a peer: open ports, the host and program that answer, round-trip time, path MTU, rate.

The peer runs peer_listener. Every probe is TCP to a port that a run uses, because firewalls and broken paths
may treat other traffic differently. Standard library only.
"""

from __future__ import annotations

import errno
import socket
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import route_get
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_listener import (
    drain,
    family_of,
    pour,
    read_line,
    send_line,
)

CONNECT_SECONDS = 3.5
"""Longer than the 3 s after which the kernel reports that no host on the link has the address."""
ANSWER_SECONDS = 2.0
SEGMENT_SECONDS = 1.5
"""Seconds until a packet counts as lost: enough for two retransmissions."""
ROUND_TRIPS = 30
PACKETS = (8000, 4000, 1500, 1492, 1480, 1450, 1420, 1400, 1380, 1340, 1300, 1280, 1200, 1000, 576)
"""Bytes of the IP packets that are tried if one of full size is lost."""
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.ENONET)


class NoAnswerError(TimeoutError):
    """Raised if a peer accepts a connection but does not answer within ANSWER_SECONDS."""


@dataclass(frozen=True)
class PeerPath:
    """The path from this host to a peer on which a listener (peer_listener) runs.

    host, address: name and address of the peer. token: the secret that this host and the listener share.
    connect_seconds: the longest wait for a connection.
    """

    host: str
    address: str
    token: str
    connect_seconds: float = CONNECT_SECONDS

    def call(self, port: int, packet: int = 0, **asked: Any) -> Any:
        """Connect to a port of the peer's listener. Returns (socket, the answer of the listener as a dict).

        packet: the most bytes of an IP packet in both directions, 0 for no bound. asked: further fields of
        the request, such as do. Raises OSError if the connection fails or no answer arrives, ValueError if
        another program answers.
        """
        connection = socket.socket(family_of(self.address), socket.SOCK_STREAM)
        try:
            if packet:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet - headers(self.address))
            connection.settimeout(self.connect_seconds)
            connection.connect((self.address, port))
            connection.settimeout(ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_line(connection, {"token": self.token, **asked})
            try:
                answer = read_line(connection)
            except TimeoutError as error:
                raise NoAnswerError from error
            if answer.get("token") != self.token:
                raise ValueError("another program")
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def reach(self, port: int) -> dict[str, Any]:
        """Probe one port: {"state", "detail", "ms", "seen"}.

        state: open; refused; filtered (no answer at all); unreachable (the network reports it); silent
        (connected, but no data); misrouted (another host answers, which `detail` names); foreign (another
        program answers). detail: in states other than misrouted, the error message or "". ms: milliseconds
        until the answer or the error. seen: address of this host as the peer sees it; "" if unknown.
        """
        started = time.monotonic()
        found: dict[str, Any] = {"state": "open", "detail": "", "seen": ""}
        try:
            connection, answer = self.call(port, do="hello")
            connection.close()
            found["seen"] = answer.get("seen", "")
            if answer.get("host") != self.host:
                found.update(state="misrouted", detail=str(answer.get("host")))
        except ConnectionRefusedError:
            found["state"] = "refused"
        except NoAnswerError:
            found["state"] = "silent"
        except TimeoutError:
            found["state"] = "filtered"
        except ConnectionError as error:
            found.update(state="silent", detail=error.strerror or "the connection was cut")
        except ValueError as error:
            found.update(state="foreign", detail=str(error))
        except OSError as error:
            state = "unreachable" if error.errno in UNREACHABLE else "filtered"
            found.update(state=state, detail=error.strerror or str(error))
        found["ms"] = round(1000 * (time.monotonic() - started), 1)
        return found

    def round_trip(self, port: int) -> dict[str, float]:
        """Round-trip time of a 64-byte message in milliseconds: {"min", "median"} of 30 trips.

        port: an open port of the peer. Raises OSError or ValueError if the probe fails.
        """
        took = []
        connection, _answer = self.call(port, do="echo")
        with connection:
            for _ in range(ROUND_TRIPS):
                started = time.monotonic()
                connection.sendall(b"x" * 64)
                missing = 64
                while missing:
                    got = len(connection.recv(missing))
                    if not got:
                        raise ConnectionError("the echo ended")
                    missing -= got
                took.append(1000 * (time.monotonic() - started))
        return {"min": round(min(took), 3), "median": round(statistics.median(took), 3)}

    def packet_passes(self, port: int, packet: int = 0) -> tuple[int, bool, int]:
        """Send the largest packet that the connection allows. Returns (size, whether it arrived, MTU).

        size: the bytes of the IP packet that was sent. packet: the most bytes of the packet; with 0, only the
        interface and the path limit it. MTU: the path MTU in bytes that the kernel knows after the packet was
        sent. Raises OSError or ValueError if the connection fails.
        """
        connection, _answer = self.call(port, packet=packet, do="sink")
        with connection:
            overhead = options(connection) + headers(self.address)
            segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            connection.settimeout(SEGMENT_SECONDS)
            try:
                connection.sendall(bytes(segment))
                connection.shutdown(socket.SHUT_WR)
                arrived = read_line(connection).get("bytes") == segment
            except (OSError, ValueError):
                arrived = False
            after = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        return segment + overhead, arrived, after + overhead

    def path_mtu(self, port: int) -> dict[str, Any]:
        """Sizes of IP packets to the peer in bytes: {"sent", "passes", "swallowed"}.

        sent: the size of the largest packet that the connection allows. passes: the size of the largest
        packet that arrives, 0 for none. swallowed: whether larger packets are lost without an error, which
        makes a run hang. A router that answers "fragmentation needed" is no fault: the kernel then sends
        smaller packets.
        """
        sent, arrived, after = self.packet_passes(port)
        if arrived:
            return {"sent": sent, "passes": min(sent, after), "swallowed": False}
        smaller = [size for size in PACKETS if size < sent]
        with ThreadPoolExecutor(len(PACKETS)) as pool:
            results = list(pool.map(lambda size: self._try_packet(port, size), smaller))
        return {"sent": sent, "passes": max(results, default=0), "swallowed": True}

    def _try_packet(self, port: int, packet: int) -> Any:
        try:
            size, arrived, _after = self.packet_passes(port, packet)
        except (OSError, ValueError):
            return 0
        return size if arrived else 0

    def stream(self, port: int, seconds: float) -> dict[str, Any]:
        """The rates to the peer and from the peer in Mbit/s: {"sent_mbit", "received_mbit"}.

        The two directions are measured one after the other, each for `seconds` seconds. port: an open port of
        the peer. Raises OSError, ValueError or KeyError if the measurement fails.
        """
        connection, _answer = self.call(port, do="sink")
        with connection:
            connection.settimeout(seconds + ANSWER_SECONDS)
            pour(connection, seconds)
            counted = read_line(connection)
            sent = rate(counted["bytes"], counted["seconds"])
        connection, _answer = self.call(port, do="source", seconds=seconds)
        with connection:
            connection.settimeout(seconds + ANSWER_SECONDS)
            received = rate(*drain(connection))
        return {"sent_mbit": sent, "received_mbit": received}


def rate(count: float, seconds: float) -> float:
    """The rate of `count` bytes in `seconds` seconds, in Mbit/s; 0 if `seconds` is 0."""
    return round(8e-6 * count / seconds, 1) if seconds > 0 else 0.0


def headers(address: str) -> int:
    """The bytes of the IP and TCP headers of a packet without options: 60 for IPv6, 40 for IPv4.

    address: the IP address of either end.
    """
    return 60 if ":" in address else 40


def options(connection: socket.socket) -> int:
    """The bytes that TCP options take in each packet of a connection: 12 if it uses timestamps, else 0."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    return 12 if struct.unpack("8B", info)[5] & 1 else 0


def is_up(address: str, port: int) -> bool:
    """Whether a host answers at this address: its SSH port accepts or refuses a connection."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


def end(path: PeerPath, ports: list[dict[str, Any]], me: str) -> None:
    """Notify the listener of a peer that the host `me` will not call again.

    path: to the peer. ports: the listeners of the peer, [{"port"}]; the first that answers gets the message.
    """
    for each in ports:
        try:
            asked: dict[str, Any] = {"do": "done", "from": me}
            connection, _answer = path.call(each["port"], **asked)
        except (OSError, ValueError):
            continue
        connection.close()
        return


def probe(path: PeerPath, ports: list[dict[str, Any]], ssh_port: int) -> dict[str, Any]:
    """Run all probes of a path except those of the rates; returns the results as a dict.

    path: to the peer. ports: the listeners of the peer, [{"port", "role"}]. ssh_port: the SSH port of the
    peer, which is tried if no listener answers. Keys of the result: route (see route_get), ports (each also
    with the keys of `reach`), rtt_ms (see round_trip), mtu (see path_mtu), up (whether the peer answers at
    all), and cut (the error) if a probe breaks off. rtt_ms and mtu are None if they were not measured.
    """
    with ThreadPoolExecutor(max(1, len(ports))) as pool:
        probed = list(pool.map(lambda each: {**each, **path.reach(each["port"])}, ports))
    good = [each["port"] for each in probed if each["state"] == "open"]
    found: dict[str, Any] = {"route": route_get(path.address), "ports": probed, "rtt_ms": None, "mtu": None}
    found["up"] = bool(good) or is_up(path.address, ssh_port)
    if not good:
        return found
    try:
        found["rtt_ms"] = path.round_trip(good[0])
        found["mtu"] = path.path_mtu(good[0])
    except (OSError, ValueError) as error:
        found["cut"] = str(error)
    return found
