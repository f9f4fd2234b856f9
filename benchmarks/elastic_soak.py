"""Disturbs an elastic run for a while, and measures its goodput: the share of possible steps that it trained.

    python -m benchmarks.elastic_soak --lab NAME --data-dir data --out artifacts/soak --minutes 30 --seed 1

NAME is a lab of three or more hosts, as for `python -m benchmarks.elastic`. The events are those of that
benchmark. Here they happen at random times, every 45 s on average, to any host, also to the one that
coordinates the run. Several hosts may be away at once, but not so many that no majority is left. The seed
fixes the random numbers. Two soaks (runs of this benchmark) with the same seed can still differ, because an
event waits until hosts are back from earlier events. Prints each event and the result, and writes
OUT/soak.json; --record also writes docs/recorded/soak.json.

goodput = steps trained / steps that the members could have trained in the same time, at the median duration
of a step with the same number of members. The members are the hosts that train at a moment. Steps that are
trained again count once. Changes of the members, copies of the state and the wait for a lost member
count as lost time. The time in which a host boots or is away does not, because the host is no member then.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import elastic, elastic_lab, failover, ranks, record
from benchmarks.elastic_lab import Lab
from benchmarks.lab import machine

ROOT = ranks.ROOT
RECORD = record.RECORDED / "soak.json"
MARK = "soak"  # of the result in docs/explanation/elastic.md
EVERY_SECONDS = 45.0
AWAY_SECONDS = 5.0, 20.0  # the least and the most
SETTINGS = {**elastic.SETTINGS, "elastic": "true"}
SETTLE_SECONDS = 60.0  # after the last event, for the hosts to return


@dataclass
class Soak:
    """What has happened to a run in a soak.

    began, ended: Unix times. counts: {event: the number of times that it happened}. events: the sum of these.
    """

    began: float = 0.0
    ended: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return sum(self.counts.values())


def disturb(lab: Lab, minutes: float, seed: int, say: Callable[[str], None] = print) -> Soak:
    """Let random events happen to the run of `lab`, and wait until the hosts are back.

    minutes: the time in which events begin. seed: the seed of the random events. say: a function that prints
    a line.
    """
    chance, soak = random.Random(seed), Soak(began=time.time())
    order = itertools.count()
    due: list[tuple[float, int, Callable[[], object]]] = []  # what ends an event, by its time
    busy: dict[int, float] = {}  # host -> until when nothing else happens to it
    end, next_at = soak.began + 60 * minutes, soak.began + chance.expovariate(1 / EVERY_SECONDS)
    try:
        while time.time() < end or due:
            if due and due[0][0] <= time.time():
                heapq.heappop(due)[2]()
            free = [host for host in range(1, lab.hosts + 1) if busy.get(host, 0.0) <= time.time()]
            is_due = next_at <= time.time() < end and len(free) > lab.hosts // 2 + 1
            if is_due and members(lab) > lab.hosts // 2 + 1:
                host = chance.choice(free)
                event, away = chance.choice(elastic_lab.events(lab, host)), chance.uniform(*AWAY_SECONDS)
                soak.counts[event.name] = soak.counts.get(event.name, 0) + 1
                say(f"{time.time() - soak.began:6.0f} s: {event.name} of {lab.host(host)} for {away:.0f} s")
                event.plant()
                if event.fix:
                    heapq.heappush(due, (time.time() + away, next(order), event.fix))
                busy[host] = time.time() + away + AWAY_SECONDS[0]
                next_at += chance.expovariate(1 / EVERY_SECONDS)
            time.sleep(0.2)
    finally:  # after an error or Ctrl-C no host stays frozen, cut off or without power
        for _, _, fix in due:
            fix()
    time.sleep(SETTLE_SECONDS)
    soak.ended = time.time()
    return soak


def members(lab: Lab) -> int:
    """The number of hosts that train now; 0 if rank 0 has not published a loss. Each host has one rank."""
    now = failover.status(lab)
    return int(now["world_size"]) if now.get("loss") is not None else 0


def goodput(
    steps: Mapping[tuple[float, int], float],
    changes: Iterable[tuple[float, int]],
    at_first: int,
    began: float,
    ended: float,
) -> tuple[float, dict[int, float]]:
    """The goodput of a run (see the top of this file) between the times `began` and `ended`.

    Returns (goodput, {number of ranks: median seconds of a step}). steps: {(time, step): seconds of the
    step}. changes: (time, number of ranks after it) for each change of the members. at_first: the number of
    ranks at `began`. Times are Unix times. Raises ValueError if no step was trained.
    """
    marks = [(began, at_first), *sorted(each for each in changes if began < each[0] < ended)]
    periods = [(count, at, until) for (at, count), (until, _) in itertools.pairwise([*marks, (ended, 0)])]
    seconds: dict[int, list[float]] = {}
    for (at, _), taken in steps.items():
        for count, start, until in periods:
            if start < at <= until:
                seconds.setdefault(count, []).append(taken)
    medians = {count: statistics.median(found) for count, found in sorted(seconds.items())}
    if not medians:
        raise ValueError("no step was trained")
    # Members that made no step have no median of their own: that of the nearest number stands for it.
    near = {count: min(medians, key=lambda known: abs(known - count)) for count, _, _ in periods}
    possible = sum((until - at) / medians[near[count]] for count, at, until in periods)
    trained = {step for (at, step) in steps if began < at <= ended}
    return len(trained) / possible, medians


def result(lab: Lab, soak: Soak) -> dict[str, Any]:
    """The figures of a soak, from all lines of metrics.jsonl.

    A host that joins gets the lines of the steps that its file lacks, so the steps are read from one host.
    The file can still lack changes of the members, so these are read from all hosts.
    """
    lab.read(newest=None)
    for host in range(1, lab.hosts + 1):
        dataclasses.replace(lab, steps={}, observer=host).read(newest=None)  # adds to lab.changes
    changes = distinct(lab.changes)
    at_first = next((count for at, count in reversed(changes) if at <= soak.began), lab.hosts)
    share, medians = goodput(lab.steps, changes, at_first, soak.began, soak.ended)
    done = [step for (at, step) in sorted(lab.steps) if soak.began < at <= soak.ended]
    return {
        "minutes": round((soak.ended - soak.began) / 60, 1),
        "events": soak.events,
        "counts": dict(sorted(soak.counts.items())),
        "changes": sum(soak.began < at <= soak.ended for at, _ in changes),
        "steps": len(set(done)),
        "repeated": lab.repeated(),
        "goodput": round(share, 3),
        "idle": round(idle(lab.steps, soak.began, soak.ended), 3),
        "step_seconds": {str(count): round(each, 3) for count, each in medians.items()},
    }


def distinct(changes: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The changes of the number of ranks, as (time, ranks) sorted by time, each only once.

    changes: (time, ranks), as all hosts have written them.
    """
    ordered = sorted(changes)
    return [each for each, before in zip(ordered, [(0.0, 0), *ordered], strict=False) if each[1] != before[1]]


def idle(steps: Mapping[tuple[float, int], float], began: float, ended: float) -> float:
    """The share of the time from `began` to `ended` that is not covered by a completed step.

    steps: {(time, step): seconds of the step}. All times are Unix times.
    """
    ordered = sorted((at, seconds) for (at, _), seconds in steps.items() if began < at <= ended)
    gaps = [at - before - seconds for (before, _), (at, seconds) in itertools.pairwise(ordered)]
    return sum(gap for gap in gaps if gap > 0) / (ended - began)


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the events (%(default)s)")
    parser.add_argument("--sync", default=SETTINGS["sync"], metavar="MODE", help="(%(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(args.lab, args.hosts, args.data_dir.resolve(), f"soak-{int(time.time())}")
    settings = {**SETTINGS, "sync": args.sync}
    lab.play("train.yml", run_id=lab.run_id, **settings, data_dir=lab.data_dir)
    try:
        lab.wait(lambda: len(lab.steps) > elastic.CALM_STEPS, "the first steps")
        found = result(lab, disturb(lab, args.minutes, args.seed, lambda line: print(line, flush=True)))
    finally:
        lab.play("stop.yml", run_id=lab.run_id, stop_now="true")
    origin = record.origin("python -m benchmarks.elastic_soak")
    content = {**origin, "machine": machine(), "hosts": args.hosts, "seed": args.seed}
    content = {**content, "settings": settings, **found}
    print(block(content))
    for path in (args.out / RECORD.name, *([RECORD] if args.record else [])):
        record.write(path, content)
    return 0


def block(content: Mapping[str, Any]) -> str:
    """The result of a record as a paragraph for the documentation."""
    counts = ", ".join(f"{name} {count}" for name, count in content["counts"].items())
    seconds = ", ".join(f"{each:.2f} s with {count}" for count, each in content["step_seconds"].items())
    settings = content["settings"]
    return (
        f"**{content['minutes']:.0f} minutes of random events** on {content['hosts']} hosts of such a lab "
        f"(`{content['command']}`, seed {content['seed']}, commit `{content['commit']}`, {content['date']}; "
        f"depth {settings['depth']}, `sync={settings['sync']}`, "
        f"`snapshot_seconds={settings['snapshot_seconds']}`): {content['events']} events ({counts}) and "
        f"{content['changes']} changes of the members. {content['steps']:,} steps were trained, "
        f"{content['repeated']} of them again. The goodput is {content['goodput']:.0%}: the steps that were "
        "trained, of those that the members of each moment could have trained. The median step took "
        f"{seconds} rank(s)."
        + (f" In {content['idle']:.0%} of the time no step was computed." if "idle" in content else "")
    )


if __name__ == "__main__":
    sys.exit(main())
