"""The attempts at a run on this host, and the decision whether to start another one.

attempts.jsonl   one line for each ended attempt: outcome, reason, step, seconds
attempt.json     the running attempt; if no outcome file exists beside it, the attempt was killed
announced.json   an attempt that is to start; it is deleted when the attempt begins, so if it stays, the
                 attempt died while loading

python -m trainer again --run-dir runs/mine           # exit code 0: try again; 1: do not, and the reason
python -m trainer again --run-dir runs/mine --wait    # sleep first, longer after attempts without progress

A run directory without outcome and heartbeat files is that of a requested run: it starts without a wait, and
attempts without progress are counted from there. With --first-must-step, a first attempt that makes no step
is not repeated, because the person who requested the run reads the error now. If --wait finds that no attempt
follows, it sets `settled` in outcome.json to true. Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.files import write_json
from trainer.health.status_record import RunStatusRecord

HISTORY, UNDER_WAY, ANNOUNCED = "attempts.jsonl", "attempt.json", "announced.json"
FIRST_WAIT_SECONDS = 5.0
# Not longer: an attempt waits one minute for the other hosts, and the attempts must overlap.
LONGEST_WAIT_SECONDS = 60.0
LIMIT = 30
SETTLED = ("final", "stopped", "finished")
LOG_BYTES = 1 << 16
RAISED = re.compile(r"^(?:\[[^]]*\]:? )?(?:\w+\.)*(\w+(?:Error|Exception)): (\S.*)$", re.MULTILINE)
NOT_MET = ("DistStoreError", "DistNetworkError", "RendezvousTimeoutError")
"""Raised by torchrun when the rendezvous fails."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RestartDecision(NamedTuple):
    """Whether to start another attempt (`again`), and the reason as a sentence.

    `fruitless` is the number of last attempts in a row without progress, `wait_seconds` the wait before the
    next attempt.
    """

    again: bool
    reason: str
    fruitless: int = 0
    wait_seconds: float = 0.0


def judge(run_dir: Path, limit: int = LIMIT, first_must_step: bool = False) -> RestartDecision:
    """Decide whether to start another attempt at the run in `run_dir`. Writes nothing.

    `limit` is the number of attempts in a row without progress after which to give up. With
    `first_must_step`, a first attempt without a step is not repeated.
    """
    ends = [end for path in sorted(run_dir.glob("outcome*.json")) if (end := _load(path))]
    for kind in SETTLED:  # what is final for one rank of this host is final for all
        for end in ends:
            if end.get("outcome") == kind:
                return RestartDecision(False, f"{kind}: {end.get('reason') or 'no reason was given'}")
    if is_asked_anew(run_dir):
        return RestartDecision(True, "This is the first attempt.")
    lines = history(run_dir) + _unwritten(run_dir)
    fruitless, last = _fruitless(lines), lines[-1] if lines else {}
    if first_must_step and last.get("asked_anew") and not has_stepped(run_dir):
        return RestartDecision(
            False, f"The first attempt made no step: {last.get('reason') or 'no reason was given'}"
        )
    why = f"The last attempt: {last.get('reason') or 'no reason was given'}"
    if fruitless > limit:
        return RestartDecision(
            False,
            f"{fruitless} attempts in a row did not get past step {last.get('step', 0)}. {why}",
            fruitless,
        )
    return RestartDecision(True, why, fruitless, wait_after(fruitless))


def judge_after_boot(run_dir: Path, limit: int = LIMIT) -> RestartDecision:
    """Decide, after the host has booted, whether to start the run again that its shutdown has ended.

    An orderly shutdown ends the ranks by SIGTERM: their outcome `stopped` is not settled, and its file is
    deleted here. A file named stop in the run directory, a request to stop, prevents the start.
    """
    if (run_dir / "stop").exists():
        return RestartDecision(False, "stopped: the run was asked to stop before the host went down")
    for path in run_dir.glob("outcome*.json"):
        if _may_be_a_shutdown(_load(path)):
            path.unlink(missing_ok=True)
    return judge(run_dir, limit)


def judge_at_end(run_dir: Path, limit: int = LIMIT) -> RestartDecision:
    """Decide, when an attempt has ended, whether to start the run again if the host boots. Writes nothing."""
    if any(_may_be_a_shutdown(_load(path)) for path in run_dir.glob("outcome*.json")):
        return RestartDecision(True, "The attempt was ended by SIGTERM, perhaps because its host goes down.")
    return judge(run_dir, limit)


def _may_be_a_shutdown(end: dict[str, Any]) -> bool:
    return end.get("outcome") == "stopped" and not end.get("settled")


def wait_after(fruitless: int) -> float:
    """Seconds to wait after `fruitless` attempts in a row without progress.

    1 attempt: 0 s; 2, 3, ... attempts: 5, 10, 20, 40, 60, 60 ... s.
    """
    if fruitless < 2:
        return 0.0
    return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(fruitless - 2, 10))


def _fruitless(lines: list[dict[str, Any]]) -> int:
    """The number of last attempts without progress, from the lines of attempts.jsonl since the last request.

    The attempt that reached the furthest step is included in the count.
    """
    count, furthest = 0, -1
    for line in lines:
        if line.get("asked_anew"):
            count, furthest = 0, -1
        step = int(line.get("step") or 0)
        count = 1 if step > furthest else count + 1
        furthest = max(furthest, step)
    return count


def history(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of attempts.jsonl, the oldest first; damaged lines are left out."""
    try:
        raw = (run_dir / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    lines = []
    for text in raw:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def is_asked_anew(run_dir: Path) -> bool:
    """Whether `run_dir` has no outcome, heartbeat or announced.json: the run was requested, not restarted."""
    names = ("outcome*.json", "heartbeat-*.json", ANNOUNCED)
    return not any(path for name in names for path in run_dir.glob(name))


def has_stepped(run_dir: Path) -> bool:
    """Whether a rank of this host made a step in its last attempt: its heartbeat file has a loss."""
    return any(beat.loss is not None for beat in _heartbeats(run_dir))


def begin(run_dir: Path) -> None:
    """Write attempt.json for the attempt that begins; adds an earlier killed attempt to attempts.jsonl.

    Call it before the outcome of the earlier attempt is removed. Raises OSError.
    """
    announced = _load(run_dir / ANNOUNCED)
    if not announced and (killed := killed_attempt(run_dir)) is not None:
        _add(run_dir, killed)
    under_way = {
        "pid": os.getpid(),
        "boot_id": _boot_id(),
        "began": time.time(),
        "asked_anew": announced.get("asked_anew", is_asked_anew(run_dir)),
    }
    write_json(run_dir / UNDER_WAY, under_way)
    (run_dir / ANNOUNCED).unlink(missing_ok=True)


def was_requested(run_dir: Path) -> bool:
    """Whether the running attempt was requested by a person; False for a restart."""
    return bool(_load(run_dir / UNDER_WAY).get("asked_anew", True))


def announce(run_dir: Path) -> None:
    """Write announced.json before an attempt starts, so that an attempt that fails while loading is counted.

    An earlier attempt that has no line in attempts.jsonl gets one. Errors of the disk are ignored.
    """
    content = {"began": time.time(), "asked_anew": is_asked_anew(run_dir)}
    with contextlib.suppress(OSError):  # the attempt itself reports a full disk
        for line in _unwritten(run_dir):
            _add(run_dir, line)
        (run_dir / UNDER_WAY).unlink(missing_ok=True)
        write_json(run_dir / ANNOUNCED, content)


def _unwritten(run_dir: Path) -> list[dict[str, Any]]:
    """The line, if any, that attempts.jsonl lacks: of an attempt that was killed or that never began."""
    announced = _load(run_dir / ANNOUNCED)
    if announced:
        return [_never_began(run_dir, announced)]
    killed = killed_attempt(run_dir)
    return [killed] if killed else []


def _never_began(run_dir: Path, announced: dict[str, Any]) -> dict[str, Any]:
    return {
        "outcome": "retryable",
        "reason": _last_exception(run_dir)
        or "It ended while loading; train.log has the reason, or it was killed because memory ran out.",
        "step": int((history(run_dir) or [{}])[-1].get("step") or 0),
        **announced,
        "time": _last_output_at(run_dir) or announced.get("began"),
    }


def _last_output_at(run_dir: Path) -> float | None:
    """Time of the last write to train.log, in seconds since the epoch; None without the file."""
    try:
        return (run_dir / "train.log").stat().st_mtime
    except OSError:
        return None


def _last_exception(run_dir: Path) -> str:
    """The last exception of the last attempt in train.log, as a sentence; "" if there is none."""
    try:
        with open(run_dir / "train.log", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            log = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    raised = RAISED.findall(log.rpartition("\n=== ")[2])
    if not raised:
        return ""
    kind, text = raised[-1]
    if kind in NOT_MET:
        return f"The ranks did not meet: {text}"
    return f"It ended while loading: {kind}: {text}"


def end(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Add the running attempt to attempts.jsonl and delete attempt.json. Raises OSError.

    `outcome` is the content of outcome.json.
    """
    under_way = _load(run_dir / UNDER_WAY)
    names = (
        "run_id",
        "rank",
        "outcome",
        "reason",
        "step",
        "loss",
        "checkpoint",
        "seconds",
        "time",
        "settled",
        "alone",
    )
    line = {name: outcome.get(name) for name in names}
    _add(run_dir, {**line, "began": under_way.get("began"), "asked_anew": under_way.get("asked_anew", False)})
    (run_dir / UNDER_WAY).unlink(missing_ok=True)


def killed_attempt(run_dir: Path) -> dict[str, Any] | None:
    """The line for attempts.jsonl of an attempt that left no outcome; None if there is no attempt.json."""
    under_way = _load(run_dir / UNDER_WAY)
    if not under_way:
        return None
    own = (beat for beat in _heartbeats(run_dir) if beat.pid == under_way.get("pid"))
    beat = next(own, RunStatusRecord())
    if under_way.get("boot_id") and under_way["boot_id"] != _boot_id():
        what = "Its host went down"
    else:
        what = "Killed by SIGKILL: by hand, or by the kernel because memory ran out,"
    began, seen = float(under_way.get("began") or 0), beat.time or 0.0
    return {
        "run_id": beat.run_id or None,
        "rank": beat.rank,
        "outcome": "retryable",
        "reason": f"{what} in {beat.phase or 'load'} after step {beat.step}.",
        "step": beat.step,
        "loss": beat.loss,
        "checkpoint": beat.checkpoint["path"] if beat.checkpoint else None,
        "seconds": round(max(0.0, seen - began), 3),
        "time": seen or began,
        "began": began,
        "asked_anew": under_way.get("asked_anew", False),
    }


def settle(run_dir: Path) -> None:
    """Set `settled` to true in outcome.json: no attempt follows.

    A killed attempt has no outcome.json; it is written here.
    """
    ends = [end for path in sorted(run_dir.glob("outcome*.json")) if (end := _load(path))]
    known = [end for end in ends if end.get("outcome") in SETTLED]  # by another rank of this host, perhaps
    outcome = (known or ends or _unwritten(run_dir) or [{}])[0]
    if outcome and not outcome.get("settled"):
        with contextlib.suppress(OSError):
            write_json(run_dir / "outcome.json", {**outcome, "settled": True})


def _add(run_dir: Path, line: dict[str, Any]) -> None:
    with open(run_dir / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _heartbeats(run_dir: Path) -> list[RunStatusRecord]:
    return [RunStatusRecord.load(_load(path)) for path in sorted(run_dir.glob("heartbeat-*.json"))]


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--limit",
        type=int,
        default=LIMIT,
        metavar="N",
        help="attempts in a row without progress after which to give up (%(default)s)",
    )
    parser.add_argument(
        "--first-must-step", action="store_true", help="give up if the first attempt made no step"
    )
    parser.add_argument(
        "--wait", action="store_true", help="sleep before the next attempt; set `settled` if none follows"
    )
    parser.add_argument(
        "--at",
        choices=("restart", "boot", "end"),
        default="restart",
        help="boot: for a host that has just booted, whose shutdown is no reason to end the run; end: "
        "whether a run whose attempt has just ended is started again at a boot (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run `trainer again`: print the decision; returns 0 if it is to start another attempt, else 1.

    With --wait: sleeps and writes announced.json before another attempt; else sets `settled` in outcome.json.
    """
    if args.at == "boot":
        decision = judge_after_boot(args.run_dir, args.limit)
    elif args.at == "end":
        decision = judge_at_end(args.run_dir, args.limit)
    else:
        decision = judge(args.run_dir, args.limit, args.first_must_step)
    if args.json:
        print(json.dumps(decision._asdict()), flush=True)
    elif decision.again:
        print(f"Restart in {decision.wait_seconds:g} s. {decision.reason}", flush=True)
    else:
        print(f"No restart. {decision.reason}", flush=True)
    if args.wait and decision.again:
        time.sleep(decision.wait_seconds)
        announce(args.run_dir)
    elif args.wait:
        settle(args.run_dir)
    return 0 if decision.again else 1
