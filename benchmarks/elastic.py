"""Measures what it costs a run when a host is lost, leaves or returns, with and without elastic=true.

    python -m benchmarks.elastic --lab NAME --data-dir data --out artifacts/elastic --record

NAME is a lab of three or more hosts that setup.yml has set up with the same data:

    ansible-playbook lab.yml -e lab_state=up -e lab_name=NAME -e lab_hosts=3
    ansible-playbook -i .lab/NAME/inventory setup.yml -e data_dir=data

Each event happens to the last host (--host), --repeats times with elastic=true, and --restarts times with
elastic=false, where the units restart the run from its last checkpoint. A checkpoint is saved every minute. A
host that is cut off, frozen, stopped or without power is back after 20 s. Writes the medians to
OUT/elastic.json after each event, and prints them at the end; --record also writes
docs/recorded/elastic.json, where with --repeats 0 or --restarts 0 the earlier figures of that part stay. The
times are those of the lines in metrics.jsonl of another host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import ranks, record
from benchmarks.elastic_lab import AWAY_SECONDS, RUNS, Event, Lab, events, leave
from benchmarks.lab import machine
from trainer.formatting import markdown_table

ROOT = ranks.ROOT
RECORD = record.RECORDED / "elastic.json"
MARK = "elastic"  # of the result in docs/explanation/elastic.md
CALM_STEPS = 5  # of all ranks before the next event
SETTINGS = {
    "depth": 4,
    "total_batch_size": 4096,
    "sequence_len": 256,
    "sync": "exact",
    "snapshot_seconds": "auto",
    "steps": 1_000_000,
    "eval_every": 0,
    "sample_every": 0,
    "save_minutes": 1,
    "doctor": "never",
    "tracker": "none",
}


def measure(lab: Lab, event: Event, elastic: bool) -> dict[str, float]:
    """Let an event happen, and wait until all ranks train again; returns the figures of the event.

    next_step: seconds from the event to the first step after the interruption. pause: seconds between that
    step and the step before it. repeated: the number of steps that were trained again.
    elastic: whether the run is elastic. If True, the figures also have
    return: seconds from the end of the event to the first step of all ranks. join_pause: seconds between that
    step and the step before it. changes: the number of changes of the members, the ranks that train.
    megabytes: the MB that all ranks have sent in these changes. stopped: the longest time in seconds for
    which the ranks of a host stopped in the first change.
    """
    lab.read()
    calm = time.time()
    lab.wait(lambda: len(lab.after(calm)) >= CALM_STEPS, f"{CALM_STEPS} steps before {event.name}")
    hosts = range(1, lab.hosts + 1)
    repeated, before = lab.repeated(), [len(lab.continued(host)) for host in hosts]
    planted, fixed = event.happen(lab)
    if elastic:
        figures = _elastic_figures(lab, planted, fixed)
        new = [lab.continued(host)[count:] for host, count in zip(hosts, before, strict=True)]
        return {
            **figures,
            "repeated": float(lab.repeated() - repeated),
            "megabytes": sum(sent for each in new for _, sent in each),
            "stopped": max((each[0][0] for each in new if len(each) > 1), default=0.0),  # of those that stay
        }
    return _restart_figures(lab, planted, fixed)


def _elastic_figures(lab: Lab, planted: float, fixed: float) -> dict[str, float]:
    def are_all_back() -> bool:
        changes = [change for change in lab.changes if change[0] > planted]
        return bool(changes) and changes[-1][1] == lab.hosts and len(lab.after(changes[-1][0])) > 1

    lab.wait(are_all_back, "the return of the last host")
    changes = [change for change in lab.changes if change[0] > planted]
    lost, returned = changes[0][0], changes[-1][0]
    resumed, pause, _ = around(lab.steps, lost)
    joined, join_pause, _ = around(lab.steps, returned)
    figures = {"next_step": resumed - planted, "pause": pause}
    return {**figures, "return": joined - fixed, "join_pause": join_pause, "changes": float(len(changes))}


def _restart_figures(lab: Lab, planted: float, fixed: float) -> dict[str, float]:
    def continues() -> bool:
        since = lab.after(max(planted, fixed))
        has_paused = longest_gap(lab.steps, planted)[1] > AWAY_SECONDS / 4
        return len(since) > 2 and (has_paused or time.time() - fixed > 90)

    lab.wait(continues, "steps after a restart", 600)
    before, pause = longest_gap(lab.steps, planted)
    resumed, _, repeated = around(lab.steps, before)
    return {"next_step": resumed - planted, "pause": pause, "repeated": float(repeated)}


def around(steps: Iterable[tuple[float, int]], at: float) -> tuple[float, float, int]:
    """The first step after the time `at`, as (its time, seconds since the step before it, repeated steps).

    steps: (time, step) of each step. repeated steps: how many of the steps before `at` are trained again.
    """
    done = [(when, step) for when, step in sorted(steps) if when <= at]
    when, step = min(key for key in steps if key[0] > at)
    return when, when - done[-1][0], max(0, max(each for _, each in done) - step + 1)


def longest_gap(steps: Iterable[tuple[float, int]], after: float) -> tuple[float, float]:
    """The longest time between two consecutive steps, as (its start, its seconds).

    steps: (time, step) of each step. after: only steps after this time count as the second of the two.
    """
    times = sorted(when for when, _ in steps)
    gaps = [(end - start, start) for start, end in itertools.pairwise(times) if end > after]
    seconds, start = max(gaps, default=(0.0, after))
    return start, seconds


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure in `found`, rounded to one decimal; {} if `found` is empty."""
    names = found[0] if found else {}
    return {name: round(statistics.median(each[name] for each in found), 1) for name in names}


def copies(lab: Lab) -> dict[str, float]:
    """Figures of the copies of the training state that the rank on one host, lab.observer, has made.

    copies: the number of copies. pause_seconds: the median pause of training for a copy. state_bytes: the
    mean size of a checkpoint in bytes.
    """
    text = lab.inside(lab.observer, f"grep -h 'Copying the state' {RUNS}/{lab.run_id}/train.log || true")
    pauses = [float(line.rsplit("paused ", 1)[1].split()[0]) for line in text.splitlines()]
    size = lab.inside(
        lab.observer,
        f"du -sb {RUNS}/{lab.run_id}/checkpoints | cut -f1; ls {RUNS}/{lab.run_id}/checkpoints | wc -l",
    )
    total, count = map(int, size.split())
    return {
        "copies": len(pauses),
        "pause_seconds": round(statistics.median(pauses), 3) if pauses else 0.0,
        "state_bytes": total // max(count, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each event (%(default)s)")
    parser.add_argument(
        "--restarts", type=int, default=5, metavar="N", help="with elastic=false (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="EVENT", help="these events, as in the table"
    )
    parser.add_argument("--host", type=int, metavar="N", help="to which they happen (the last one)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the run, such as depth=8"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    args.settings = {**SETTINGS, **dict(each.split("=", 1) for each in args.set)}
    args.out.mkdir(parents=True, exist_ok=True)
    origin = {
        **record.origin("python -m benchmarks.elastic"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "hosts": args.hosts,
        "away_seconds": AWAY_SECONDS,
        "settings": args.settings,
    }
    content: dict[str, Any] = recorded(origin, args.repeats, args.restarts) if args.record else {**origin}
    for elastic, repeats in ((True, args.repeats), (False, args.restarts)):
        if repeats:
            run(args, elastic, repeats, content)
    print(block(content))
    return 0


def recorded(origin: Mapping[str, Any], repeats: int, restarts: int) -> dict[str, Any]:
    """The content of the record before the measurement: its origin, and the part that is not measured now.

    origin: commit, hardware and settings of the measurement. repeats, restarts: how often each event is
    measured with elastic=true and with elastic=false; a part with 0 is not measured. The part with
    elastic=false has its own commit and date, restart_commit and restart_date. Raises SystemExit if a part
    would be recorded beside a part with other hosts, settings or hardware.
    """
    before = json.loads(RECORD.read_text(encoding="utf-8"))
    differs = [name for name in ("hosts", "settings", "machine") if before[name] != origin[name]]
    if differs and not (repeats and restarts):
        raise SystemExit(
            f"{RECORD.relative_to(ROOT)} was measured with other {' and '.join(differs)}: leave out "
            "--record, or measure both parts, without --repeats 0 and --restarts 0."
        )
    if not repeats:
        return {**before, "restart_commit": origin["commit"], "restart_date": origin["date"]}
    content = {**origin, "restart_commit": origin["commit"], "restart_date": origin["date"]}
    if not restarts:
        for name in ("commit", "date"):
            content[f"restart_{name}"] = before.get(f"restart_{name}", before[name])
        content |= {
            name: each for name, each in before.items() if name in ("restart", "restart_step_seconds")
        }
    return content


def run(args: argparse.Namespace, elastic: bool, repeats: int, content: dict[str, Any]) -> None:
    """Start a run, let each event happen `repeats` times, and add the medians to `content`."""
    key = "elastic" if elastic else "restart"
    victim = args.host or args.hosts
    lab = Lab(args.lab, args.hosts, args.data_dir.resolve(), f"{key}-{int(time.time())}")
    lab.observer = 1 if victim > 1 else 2
    settings = {**args.settings, "elastic": str(elastic).lower(), "data_dir": lab.data_dir}
    lab.play("train.yml", run_id=lab.run_id, **settings)
    try:
        lab.read()
        lab.wait(lambda: len(lab.steps) > 20, "20 steps")
        quiet = list(lab.steps.values())[2:]
        content[f"{key}_step_seconds"] = round(statistics.median(quiet), 3)
        possible = [*events(lab, victim), leave(lab, victim)]
        possible = [each for each in possible if elastic or not each.is_elastic]
        asked = [each for each in possible if not args.only or each.name in args.only]
        found: dict[str, list[dict[str, float]]] = {event.name: [] for event in asked}
        for repeat in range(repeats):
            for event in asked:
                try:
                    found[event.name].append(measure(lab, event, elastic))
                except SystemExit as error:
                    print(f"{key} {repeat + 1}: {event.name}: {error}", flush=True)
                    continue
                figures = found[event.name][-1]
                print(f"{time.strftime('%H:%M:%S')} {key} {repeat + 1}: {event.name} {figures}", flush=True)
                keep(args, content, key, found)
        if elastic:
            content["copy"] = copies(lab)
            keep(args, content, key, found)
    finally:
        lab.play("stop.yml", run_id=lab.run_id, stop_now="true")


def keep(
    args: argparse.Namespace, content: dict[str, Any], key: str, found: Mapping[str, list[dict[str, float]]]
) -> None:
    """Add the medians so far to `content` as its entry `key`, and write `content` to OUT/elastic.json.

    With --record, `content` is also written to docs/recorded/elastic.json. found: {event: figures of each
    repeat}.
    """
    content[key] = [
        {"event": name, "repeats": len(each), **medians(each)} for name, each in found.items() if each
    ]
    record.write(args.out / RECORD.name, content)
    if args.record:
        record.write(RECORD, content)


HEAD = (
    "event",
    "next step after, s",
    "pause of the others, s",
    "steps trained again",
    "back after, s",
    "pause when it joins, s",
    "sent in both changes, MB",
    "`elastic=false`: next step after, s",
    "steps trained again",
)


def table(content: Mapping[str, Any]) -> str:
    """The table of a record, as Markdown: a row for each event, with the figures of elastic=true.

    content: the record. If it also has runs with elastic=false, each row has their figures too.
    """
    restarts = {row["event"]: row for row in content.get("restart", [])}
    rows = []
    for row in content.get("elastic", []):
        beside = restarts.get(row["event"])
        cells = [
            row["event"],
            f"{row['next_step']:.1f}",
            f"{row['pause']:.1f}",
            f"{row['repeated']:.0f}",
            f"{row['return']:.0f}",
            f"{row['join_pause']:.1f}",
            f"{row['megabytes']:.0f}" if "megabytes" in row else "-",
        ]
        cells += [f"{beside['next_step']:.0f}", f"{beside['repeated']:.0f}"] if beside else ["-", "-"]
        rows.append(cells if restarts else cells[:7])
    return markdown_table([HEAD if restarts else HEAD[:7], *rows], aligned=False)


def block(content: Mapping[str, Any]) -> str:
    """The table of a record, with sentences on its hardware, command and settings."""
    counts = {
        key: max((row["repeats"] for row in content.get(key, [])), default=0)
        for key in ("elastic", "restart")
    }
    settings, copy, hosts = content["settings"], content.get("copy"), content["hosts"]
    beside = ""
    if counts["restart"]:
        beside = f", and of {counts['restart']} with `elastic=false` and a checkpoint every minute"
        if content.get("restart_commit", content["commit"]) != content["commit"]:
            beside += f" (commit `{content['restart_commit']}`, {content['restart_date']})"
    text = (
        f"**Measured in containers on one machine** ({content['machine']}), {hosts} hosts with one thread "
        f"each on its cores (load of other programs before: {content['load']:g}): `{content['command']}`, "
        f"commit `{content['commit']}`, {content['date']}. Depth {settings['depth']}, "
        f"{int(settings['total_batch_size']):,} tokens in a step, `sync={settings['sync']}`, "
        f"`snapshot_seconds={settings['snapshot_seconds']}`. "
        f"Medians of up to {counts['elastic']}{beside}. A host that is frozen, cut off, stopped or without "
        f"power is there again after {content['away_seconds']:.0f} s; *back after* counts from then.\n\n"
        f"{table(content)}\n\n"
        f"The median step took {content['elastic_step_seconds']:.2f} s with {hosts} ranks"
    )
    if "restart_step_seconds" in content:
        text += f", and {content['restart_step_seconds']:.2f} s with `elastic=false`"
        if content.get("restart_commit", content["commit"]) != content["commit"]:
            text += " in its own measurement; see [the cost](#what-it-costs) for both in one"
    if copy:
        text += (
            f". Training paused {copy['pause_seconds']:.2f} s for a copy (median of {copy['copies']}); the "
            f"state is {copy['state_bytes'] / 1e6:.0f} MB"
        )
    return text + "."


if __name__ == "__main__":
    sys.exit(main())
