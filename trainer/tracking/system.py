"""What the host of rank 0 is doing, sampled every few seconds into system.jsonl.

The names are those of MLflow's own system metrics where it has one, so that its page groups and draws them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from trainer.tracking import files
from trainer.tracking.files import JsonLines

SAMPLE_SECONDS = 10.0
LAST_SAMPLE_SECONDS = 0.2
THROTTLE_COUNTS = "/sys/devices/system/cpu"  # cpu*/thermal_throttle/core_throttle_count
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")


class SystemSampler:
    """A thread that samples until it is closed, and once more then."""

    def __init__(self, run_dir: Path, every_seconds: float = SAMPLE_SECONDS) -> None:
        self._run_dir, self._every = run_dir, every_seconds
        self._lines = JsonLines(run_dir / files.SYSTEM)
        self._closing = threading.Event()
        self._process = psutil.Process()
        self._network = psutil.net_io_counters()
        psutil.cpu_percent()  # later calls tell what happened since the one before
        self._process.cpu_percent()
        self._thread = threading.Thread(target=self._work, name="system", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last sample; a disk that does not answer is not waited for."""
        self._closing.set()
        self._thread.join(LAST_SAMPLE_SECONDS)

    def _work(self) -> None:
        number = self._lines.last_step
        closing = False
        while not closing:
            closing = self._closing.wait(self._every)
            number += 1
            with contextlib.suppress(OSError, psutil.Error):  # a host without this sensor, a full disk
                self._lines.write(number, self.sample(), time.time())

    def sample(self) -> dict[str, float]:
        """The host now: percentages, megabytes (since the run's beginning for the network), degrees."""
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(str(self._run_dir))
        figures = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "process_cpu_percentage": self._process.cpu_percent(),
            "process_memory_megabytes": self._process.memory_info().rss / 1e6,
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "system_memory_available_megabytes": memory.available / 1e6,
            "load_1_minute": psutil.getloadavg()[0],
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / 1e6,
        }
        network = psutil.net_io_counters()
        if network and self._network:  # no network at all in some sandboxes
            received = network.bytes_recv - self._network.bytes_recv
            transmitted = network.bytes_sent - self._network.bytes_sent
            figures |= {
                "network_receive_megabytes": received / 1e6,
                "network_transmit_megabytes": transmitted / 1e6,
            }
        return {f"system/{name}": value for name, value in {**figures, **_heat()}.items()}


def _heat() -> dict[str, float]:
    """Temperature, clock and throttling of the CPU, as far as this host can tell."""
    figures: dict[str, float] = {}
    sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # Linux alone has it
    degrees = [reading.current for name in CPU_SENSORS for reading in sensors.get(name, ())]
    if degrees:
        figures["cpu_temperature_celsius"] = max(degrees)
    with contextlib.suppress(NotImplementedError, OSError, RuntimeError):
        if frequency := psutil.cpu_freq():
            figures["cpu_frequency_megahertz"] = frequency.current
    counts = list(Path(THROTTLE_COUNTS).glob("cpu*/thermal_throttle/core_throttle_count"))
    if counts:
        figures["cpu_throttle_events"] = float(sum(int(path.read_text()) for path in counts))
    return figures
