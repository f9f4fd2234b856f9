"""What the hosts of a lab report of an elastic run, whichever of them is the coordinator."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.elastic import RUNS, Lab


class Run:
    """What the hosts report of the run. A host that is off reports nothing."""

    def __init__(self, lab: Lab, steps: int) -> None:
        """steps: of the whole run, which must not end during a test."""
        self.lab, self.total = lab, steps
        self.run_dir = f"{RUNS}/{lab.run_id}"

    def read(self, host: int, name: str) -> dict[str, Any]:
        try:
            return dict(
                json.loads(self.lab.inside(host, f"cat {self.run_dir}/{name} 2>/dev/null || echo {{}}"))
            )
        except (SystemExit, ValueError):
            return {}

    def status(self) -> dict[str, Any]:
        """The newest run status of a rank 0, with its host as `number`; empty if there is none."""
        found = [{**self.read(host, "heartbeat-0.json"), "number": host} for host in self.hosts]
        return max(found, key=lambda status: float(status.get("time") or 0.0))

    def trains(self, ranks: int, *, without: int = 0, seconds: float = 240.0) -> int:
        """Wait until so many ranks train under another coordinator than `without`; returns its host."""
        end, since = time.monotonic() + seconds, None
        while time.monotonic() < end:
            now = self.status()
            fits = now.get("world_size") == ranks and now.get("loss") is not None
            if not fits or now["number"] == without:
                since = None
            elif since is None:
                since = now
            elif now["number"] == since["number"] and now["step"] > since["step"]:
                assert now["step"] < self.total, "the run has finished before"
                return int(now["number"])
            time.sleep(0.5)
        raise AssertionError(f"not {ranks} ranks within {seconds:.0f} s, but {self.status()}")

    def is_still(self, seconds: float) -> bool:
        """Whether no host has made a step in `seconds`."""
        before = self.steps()
        time.sleep(seconds)
        return before == self.steps()

    def steps(self) -> list[int]:
        """The newest step in the metrics.jsonl of each host."""
        shown = (self.lab.inside(host, f"tail -n 1 {self.run_dir}/metrics.jsonl") for host in self.hosts)
        return [int(json.loads(line)["step"]) for line in shown]

    @property
    def hosts(self) -> range:
        return range(1, self.lab.hosts + 1)

    def term(self, host: int) -> int:
        return int(self.read(host, "term.json").get("term", -1))
