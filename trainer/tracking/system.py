"""System metrics of the host of rank 0, sampled every few seconds to system.jsonl.

The names are those of MLflow's system metrics, so that its page groups and draws them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from trainer.health.sensors import temperature, throttle_events
from trainer.tracking import files
from trainer.tracking.files import JsonLines

SAMPLE_SECONDS = 10.0
LAST_SAMPLE_SECONDS = 0.2
NOT_AVAILABLE = (OSError, RuntimeError, NotImplementedError, AttributeError, ValueError, psutil.Error)


class SystemSampler:
    """A thread that writes a sample of the system metrics to system.jsonl every `every_seconds`.

    run_dir: the folder of system.jsonl. `close` writes one more sample.
    """

    def __init__(self, run_dir: Path, every_seconds: float = SAMPLE_SECONDS) -> None:
        self._run_dir, self._every = run_dir, every_seconds
        self._lines = JsonLines(run_dir / files.SYSTEM)
        self._closing = threading.Event()
        self._process = psutil.Process()
        self._network_before: Any = None
        self.sample()  # percentages and traffic count from the previous sample
        self._thread = threading.Thread(target=self._work, name="system", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last sample. Waits at most LAST_SAMPLE_SECONDS, because the disk may hang."""
        self._closing.set()
        self._thread.join(LAST_SAMPLE_SECONDS)

    def _work(self) -> None:
        number = self._lines.last_step
        closing = False
        while not closing:
            closing = self._closing.wait(self._every)
            number += 1
            with contextlib.suppress(OSError):  # a full disk is reported elsewhere
                self._lines.write(number, self.sample(), time.time())

    def sample(self) -> dict[str, float]:
        """The metrics that this host provides, {"system/NAME": value}; NAME ends with the unit."""
        figures: dict[str, float] = {}
        for read in (self._usage, self._network, _sensors, _frequency):
            with contextlib.suppress(*NOT_AVAILABLE):
                figures |= read()
        return {f"system/{name}": value for name, value in figures.items()}

    def _usage(self) -> dict[str, float]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._run_dir))
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "process_cpu_percentage": self._process.cpu_percent(),
            "load_1_minute": psutil.getloadavg()[0],
            "process_memory_megabytes": self._process.memory_info().rss / 1e6,
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "system_memory_available_megabytes": memory.available / 1e6,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / 1e6,
        }

    def _network(self) -> dict[str, float]:
        """Traffic of all interfaces of the host since the start of the attempt."""
        now = psutil.net_io_counters()
        before = self._network_before = self._network_before or now
        return {
            "network_receive_megabytes": (now.bytes_recv - before.bytes_recv) / 1e6,
            "network_transmit_megabytes": (now.bytes_sent - before.bytes_sent) / 1e6,
        }


def _sensors() -> dict[str, float]:
    figures = {"cpu_temperature_celsius": temperature(), "cpu_throttle_events": throttle_events()}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _frequency() -> dict[str, float]:
    return {"cpu_frequency_megahertz": psutil.cpu_freq().current}
