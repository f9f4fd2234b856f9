"""The network interface of a rank: its name, its state, and the rate at which it receives bytes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import psutil

NOT_AVAILABLE = (OSError, RuntimeError, KeyError, psutil.Error)
SPAN_SECONDS = 5.0  # the shortest interval of a rate


class NetworkInterface:
    """The network interface over which this rank is connected.

    name: name of the interface; "" if it is unknown. The environment variable GLOO_SOCKET_IFNAME sets it. If
    the variable is not set, the interface is the one with the IP address `address`.
    """

    def __init__(self, address: str) -> None:
        self.name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or interface_of(address)
        self._then, self._before = time.monotonic(), self.counters()[1]
        self._rate: float | None = None
        self._lock = threading.Lock()  # the run status and every query read it, each on a thread of its own

    def read(self) -> dict[str, Any]:
        """The state of the interface, with keys as in the run status: interface, up and received.

        interface: its name. up: whether it is active; None if unknown. received: bytes per second that
        arrive, measured over SPAN_SECONDS or more; None before the first measurement.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._then >= SPAN_SECONDS:
                _, received = self.counters()
                if received is not None and self._before is not None:
                    self._rate = (received - self._before) / (now - self._then)
                self._then, self._before = now, received
            up = None
            with contextlib.suppress(*NOT_AVAILABLE):
                up = bool(psutil.net_if_stats()[self.name].isup)
            return {"interface": self.name, "up": up, "received": self._rate}

    def counters(self) -> tuple[int | None, int | None]:
        """(bytes sent, bytes received) by the interface so far; (None, None) if it has no counters."""
        with contextlib.suppress(*NOT_AVAILABLE):
            counters = psutil.net_io_counters(pernic=True)[self.name]
            return counters.bytes_sent, counters.bytes_recv
        return None, None

    def link_mbit(self) -> int | None:
        """The rate that the network card reports in Mbit/s; None if it reports none (WiFi, virtual cards)."""
        with contextlib.suppress(*NOT_AVAILABLE):
            return psutil.net_if_stats()[self.name].speed or None
        return None


def interface_of(address: str) -> str:
    """The name of the network interface that has the IP address `address`; "" if there is none."""
    with contextlib.suppress(*NOT_AVAILABLE):
        for name, addresses in psutil.net_if_addrs().items():
            if any(known.address.partition("%")[0] == address for known in addresses):
                return str(name)
    return ""
