# SPDX-License-Identifier: MIT
"""The listening TCP sockets of this host, from /proc/net/tcp and tcp6. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text

LISTEN = "0A"
"""The state TCP_LISTEN in the fourth column of /proc/net/tcp."""
LOOPBACK6 = "0" * 24 + "01000000"
"""::1 as /proc/net/tcp6 prints it."""


@dataclass(frozen=True)
class Socket:
    """A listening TCP socket. loopback: whether it is bound to a loopback address."""

    port: int
    uid: int
    inode: int
    loopback: bool


def tables() -> list[str]:
    """The texts of /proc/net/tcp and tcp6; an empty text if the kernel has no such table."""
    return [read_text(name) for name in ("/proc/net/tcp", "/proc/net/tcp6")]


def listening(texts: list[str]) -> list[Socket]:
    """The listening sockets in the texts of `tables`."""
    found = []
    for line in (line for text in texts for line in text.splitlines()[1:]):
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTEN:
            address, _, port = fields[1].rpartition(":")
            loopback = address == LOOPBACK6 or (len(address) == 8 and address.endswith("7F"))
            found.append(Socket(int(port, 16), int(fields[7]), int(fields[9]), loopback))
    return found
