"""CPU temperature and throttling of this host, from /sys, where Linux provides them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer.host.topology import read_number

THERMAL = Path("/sys/class/thermal")
CPU = Path("/sys/devices/system/cpu")
NOT_CPUS = ("iwlwifi", "nvme", "bat", "acpitz")  # zones of other parts; acpitz is often a constant
SLOWED = 0.8  # of the processor's highest clock


class Sensors:
    """Reads the CPU temperature of this host and whether its CPU is throttled."""

    def __init__(self) -> None:
        self._throttle_events = throttle_events()

    def read(self) -> dict[str, float | bool | None]:
        """The present readings, a dict with the keys temperature and throttled.

        A value is None if the host does not provide it. temperature: see the function `temperature`.
        throttled: whether the kernel's throttle counters have grown since the last call, or the highest clock
        of the CPU is limited now.
        """
        events = throttle_events()
        slowed = None
        if events is not None and self._throttle_events is not None:
            slowed = events > self._throttle_events
        self._throttle_events = events
        limited = _clock_is_limited()
        return {"temperature": temperature(), "throttled": slowed or limited if limited else slowed}


def throttle_events() -> int | None:
    """The number of throttle events that the kernel has counted on all cores; None if it has no counters."""
    counts = [read_number(path) for path in CPU.glob("cpu*/thermal_throttle/core_throttle_count")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def temperature() -> float | None:
    """The temperature of the CPU's hottest thermal zone in degrees Celsius; None if there is no zone."""
    degrees = []
    for zone in sorted(THERMAL.glob("thermal_zone*")):
        with contextlib.suppress(OSError):
            kind = (zone / "type").read_text(encoding="utf-8").strip().lower()
            value = read_number(zone / "temp")
            if value is not None and not kind.startswith(NOT_CPUS):
                degrees.append(value / 1000)
    return max(degrees, default=None)


def _clock_is_limited() -> bool | None:
    """Whether the maximum clock set for cpu0 is below SLOWED of the hardware maximum; None if unknown."""
    best = read_number(CPU / "cpu0/cpufreq/cpuinfo_max_freq")
    limit = read_number(CPU / "cpu0/cpufreq/scaling_max_freq")
    return None if not best or limit is None else limit < SLOWED * best
