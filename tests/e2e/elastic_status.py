"""An elastic run on a lab of its own, and what the hosts report of it, whichever is the coordinator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.elastic_lab import RUNS, Lab

from .lab import LAB, Fleet
from .test_elastic import ELASTIC, MODEL


@contextmanager
def elastic_lab(
    workdir: Path,
    name: str,
    hosts: int,
    dataset: Path,
    run_id: str,
    cpu_share: float = 1.0,
    **settings: object,
) -> Iterator[Lab]:
    """A lab with so many hosts, set up, on which an elastic run trains; it is taken away at the end.

    cpu_share: the part of its core that each host may use.
    """
    lab = Lab(f"{LAB}-{name}", hosts, dataset, run_id)
    playbooks = Fleet(workdir, None)
    try:
        playbooks.play("lab.yml", lab_state="up", lab_name=lab.name, lab_hosts=hosts, lab_cpu_share=cpu_share)
        lab.play("setup.yml", data_dir=dataset)
        lab.play("train.yml", run_id=run_id, data_dir=dataset, **{**MODEL, **ELASTIC, **settings})
        yield lab
    finally:
        playbooks.play("lab.yml", lab_state="down", lab_name=lab.name)


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
