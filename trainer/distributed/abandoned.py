"""Ends process groups that were given up while collectives were in flight.

Gloo ends such a collective only after its time-out, which is minutes. Until then a thread of Gloo may use a
whole core: it waits until a socket can be written, which is always so, for a tensor that is gone (seen with
torch 2.13). So the connections of the group are shut down; its collectives then fail at once, on both sides.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GRACE_SECONDS = 1.0  # for the other ranks to learn why the group was given up, before they lose a connection
POLL_SECONDS = 0.2
WATCHED = re.compile(r"tfd:\s*(\d+)\s.*\sino:([0-9a-f]+)")  # a line of /proc/self/fdinfo of an epoll instance


def epoll_instances() -> set[int]:
    """File descriptors of this process that are epoll instances. Gloo has one for each process group."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) == "anon_inode:[eventpoll]":
                found.add(int(path.name))
    return found


def drop(groups: list[Any], in_flight: dict[int, tuple[Any, Any]], epolls: Iterable[int]) -> None:
    """Drop process groups, with their threads and sockets, once no collective is in flight.

    groups, in_flight: cleared at the end; until then they keep groups, works and tensors in memory. epolls:
    the epoll instances of the groups.
    """
    began = time.monotonic()
    while not all(work.is_completed() for work, _ in in_flight.values()):
        time.sleep(POLL_SECONDS)
        if time.monotonic() - began > GRACE_SECONDS:
            for epoll in epolls:
                _shut_down(epoll)
    in_flight.clear()
    groups.clear()


def _shut_down(epoll: int) -> None:
    """Shut down the connections that an epoll instance watches."""
    with contextlib.suppress(OSError):
        watched = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
        for number, inode in WATCHED.findall(watched):
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket that listens
                copy = os.dup(int(number))
                try:
                    _shut_down_connection(copy, int(inode, 16))
                finally:
                    os.close(copy)


def _shut_down_connection(descriptor: int, inode: int) -> None:
    """Shut down a connection, if the descriptor still has this inode. Raises OSError if it is none."""
    status = os.fstat(descriptor)
    if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
