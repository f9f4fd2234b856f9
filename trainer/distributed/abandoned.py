"""Ends process groups that were given up while collectives were in flight.

Gloo ends such a collective only after its time-out, which is minutes. Until then a thread of Gloo may use a
whole core: it polls a socket that is always writable, although the tensor to send is gone (seen with torch
2.13). It may do so even if the collective has failed on this rank, as long as something refers to torch's
handle of the collective, such as the traceback of its error: the handle keeps the connections to all ranks.
So the connections of the group are shut down; its collectives then fail at once, on both sides.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

GRACE_SECONDS = 1.0  # for the other ranks to learn why the group was given up, before they lose a connection
POLL_SECONDS = 0.2
WATCHED = re.compile(r"^tfd:.*\sino:([0-9a-f]+)", re.MULTILINE)  # in /proc/self/fdinfo of an epoll instance


def watched_sockets() -> set[int]:
    """Inode numbers of the sockets and pipes that threads of this process wait for with epoll, as Gloo's do.

    Unlike a file descriptor, an inode number is not used again.
    """
    found: set[int] = set()
    for descriptor, target in _descriptors():
        if target == "anon_inode:[eventpoll]":
            with contextlib.suppress(OSError):
                text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
                found |= {int(inode, 16) for inode in WATCHED.findall(text)}
    return found


def drop(
    groups: list[Any], in_flight: dict[int, tuple[Any, Any]], sockets: Collection[int], store_port: int
) -> None:
    """Drop process groups with their threads and sockets, and shut down the connections that are left.

    The connections are shut down after GRACE_SECONDS. groups: torch's handles of the process groups.
    in_flight: {id: (torch's handle of a collective, its tensors)}. `groups` and `in_flight` are cleared when
    no collective is in flight any more. sockets: inode numbers of the groups' sockets (see
    `watched_sockets`). store_port: port of the rendezvous store, whose connections stay open.
    """
    ending = threading.Thread(target=_clear, args=(groups, in_flight), name="abandoned group", daemon=True)
    ending.start()
    time.sleep(GRACE_SECONDS)
    _shut_down(sockets, store_port)
    while ending.is_alive():
        time.sleep(POLL_SECONDS)
        _shut_down(sockets, store_port)


def _clear(groups: list[Any], in_flight: dict[int, tuple[Any, Any]]) -> None:
    """Wait until no collective is in flight, then clear `in_flight` and `groups`.

    Clearing `groups` runs the destructors of the process groups, which wait for their threads.
    """
    while not all(work.is_completed() for work, _ in in_flight.values()):
        time.sleep(POLL_SECONDS)
    in_flight.clear()
    groups.clear()


def _shut_down(sockets: Collection[int], store_port: int) -> None:
    """Shut down the connections of `sockets` (inode numbers), except those to the rendezvous store."""
    names = {f"socket:[{inode}]": inode for inode in sockets}
    for descriptor, target in _descriptors():
        if target in names:
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket that listens
                copy = os.dup(descriptor)
                try:
                    if os.fstat(copy).st_ino == names[target]:
                        _shut_down_connection(copy, store_port)
                finally:
                    os.close(copy)


def _shut_down_connection(descriptor: int, store_port: int) -> None:
    """Shut down the connection of a socket, unless one of its ports is `store_port`.

    descriptor: file descriptor of the socket. Raises OSError if the socket is not connected.
    """
    connection = socket.socket(fileno=descriptor)
    try:
        if store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield (number, target of the link in /proc/self/fd) of each file descriptor of this process.

    Yields nothing on a system without /proc.
    """
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            yield int(path.name), os.readlink(path)
