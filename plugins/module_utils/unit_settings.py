"""Settings of a run's unit: the addresses that it exchanges packets with, and its processors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_addresses import is_loopback, resolved


def allowed(addresses: Iterable[Any], tracker_uri: str = "") -> list[str]:
    """Values of systemd's IPAddressAllow=: localhost, the given hosts, and the host of the tracker.

    addresses: IP addresses or names, which are resolved.
    """
    tracker = urlsplit(tracker_uri).hostname if tracker_uri.startswith(("http://", "https://")) else None
    names = [*filter(None, addresses), *([tracker] if tracker else [])]
    found = [address.partition("%")[0] for name in names for address in resolved(str(name))]
    return ["localhost", *dict.fromkeys(address for address in found if not is_loopback(address))]


def cpu_list(cpus: str) -> list[int]:
    """The processors that a list such as 0-3,6 names."""
    named: set[int] = set()
    for part in filter(None, str(cpus).split(",")):
        first, _, last = part.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    return sorted(named)
