"""Measures what it costs an elastic run to lose its coordinator.

    python -m benchmarks.failover --lab NAME --data-dir data --out artifacts/failover --record

NAME is a lab of three or more hosts, as for benchmarks.elastic. Each event happens --repeats times to the
coordinator, the host that coordinates the run at that moment. A host that is cut off, frozen, stopped or
without power is back after 20 s. Prints the medians and writes them to OUT/failover.json; --record also
writes docs/recorded/failover.json. The times are those of the lines in metrics.jsonl of another host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import elastic, elastic_lab, ranks, record
from benchmarks.elastic import CALM_STEPS
from benchmarks.elastic_lab import AWAY_SECONDS, POLL_SECONDS, Lab
from benchmarks.lab import machine
from trainer.formatting import markdown_table

RECORD = record.RECORDED / "failover.json"
MARK = "failover"  # of the result in docs/explanation/elastic.md
SETTINGS = {**elastic.SETTINGS, "elastic": "true"}
HEAD = ("event at the coordinator", "next step after, s", "steps trained again", "all train after, s")
WAIT_SECONDS = 240.0
REPEATED_STEPS = 60  # more than an event repeats, and enough for copies at their usual interval


def status(lab: Lab) -> dict[str, Any]:
    """The newest run status of a rank 0, as a dict; the added key `number` is the number of its host.

    {} if no host has a run status of a rank 0. Several hosts can have one, after the election of another
    coordinator.
    """
    found = []
    for host in range(1, lab.hosts + 1):
        try:
            text = (lab.run_dir(host) / "heartbeat-0.json").read_text(encoding="utf-8")
            found.append({**json.loads(text), "number": host})
        except (SystemExit, OSError, ValueError):  # it is off, or has no such file
            continue
    return max(found, key=lambda each: float(each["time"]), default={})


def measure(lab: Lab, name: str) -> dict[str, float]:
    """Let the event `name` happen to the coordinator, wait until all ranks train again, and return figures.

    next_step: seconds from the event to the next step after the members have changed. repeated: the number of
    steps that were trained again. all_after: seconds from the end of the event until all ranks train. Raises
    SystemExit if not all ranks train within WAIT_SECONDS.
    """
    coordinator = int(status(lab)["number"])
    watched = dataclasses.replace(lab, steps={}, changes=[], observer=1 if coordinator > 1 else 2)
    watched.read()
    goal = int(status(lab)["step"]) + CALM_STEPS + REPEATED_STEPS
    watched.wait(lambda: max((step for _, step in watched.steps), default=0) >= goal, f"calm before {name}")
    repeated = lab.repeated()
    (event,) = (each for each in elastic_lab.events(lab, coordinator) if each.name == name)
    planted, fixed = event.happen(watched)
    while True:
        now = status(lab)
        stepped = now.get("loss") is not None and float(now.get("time") or 0.0) > fixed + 1.0
        has_changed = any(at > planted for at, _ in watched.changes)
        if now.get("world_size") == lab.hosts and stepped and has_changed and len(watched.after(planted)) > 2:
            break
        if time.time() - fixed > WAIT_SECONDS:
            raise SystemExit(f"not all ranks train {WAIT_SECONDS:.0f} s after {name}")
        time.sleep(POLL_SECONDS)
        watched.read()
    all_after = time.time() - fixed
    changed = min(at for at, _ in watched.changes if at > planted)
    resumed, _, _ = elastic.around(watched.steps, changed)
    repeated = lab.repeated() - repeated
    return {"next_step": resumed - planted, "repeated": float(repeated), "all_after": all_after}


def table(content: Mapping[str, Any]) -> str:
    rows = [
        [row["event"], f"{row['next_step']:.1f}", f"{row['repeated']:.0f}", f"{row['all_after']:.0f}"]
        for row in content["events"]
    ]
    return markdown_table([HEAD, *rows], aligned=False)


def block(content: Mapping[str, Any]) -> str:
    """The table of a record, with a sentence on its hardware, command and settings."""
    repeats = max(row["repeats"] for row in content["events"])
    settings, counted = content["settings"], f"Medians of up to {repeats}" if repeats > 1 else "Each once"
    return (
        f"**Measured in containers on one machine** ({content['machine']}), {content['hosts']} hosts "
        f"(load of other programs before: {content['load']:g}): `{content['command']}`, commit "
        f"`{content['commit']}`, {content['date']}. Depth {settings['depth']}, "
        f"{settings['total_batch_size']:,} tokens in a step, `sync={settings['sync']}`, "
        f"`snapshot_seconds={settings['snapshot_seconds']}`. {counted}. A host that is frozen, cut off, "
        f"stopped or without power is there again after {content['away_seconds']:.0f} s; *all train after* "
        f"counts from then.\n\n{table(content)}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each event (%(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ranks.ROOT)}")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        **record.origin("python -m benchmarks.failover"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "hosts": args.hosts,
        "away_seconds": AWAY_SECONDS,
        "settings": SETTINGS,
    }
    lab = Lab(args.lab, args.hosts, args.data_dir.resolve(), f"failover-{int(time.time())}")
    lab.play("train.yml", run_id=lab.run_id, data_dir=lab.data_dir, **SETTINGS)
    try:
        names = [each.name for each in elastic_lab.events(lab, 1)]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repeat in range(args.repeats):
            for name in names:
                try:
                    found[name].append(measure(lab, name))
                    print(f"{time.strftime('%H:%M:%S')} {repeat + 1}: {name} {found[name][-1]}", flush=True)
                except SystemExit as error:
                    print(f"{time.strftime('%H:%M:%S')} {repeat + 1}: {name}: {error}", flush=True)
            content["events"] = [
                {"event": name, "repeats": len(each), **elastic.medians(each)}
                for name, each in found.items()
                if each
            ]
            record.write(args.out / RECORD.name, content)
            if args.record:
                record.write(RECORD, content)
    finally:
        lab.play("stop.yml", run_id=lab.run_id, stop_now="true")
    print(block(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
