"""The decision whether to start another attempt at a run on this host.

python -m trainer again --run-dir runs/mine           # exit code 0: restart; 1: no restart, and the reason
python -m trainer again --run-dir runs/mine --wait    # sleep first, longer after attempts without progress

If the run directory has no outcome, heartbeat or announced.json, a person has just requested the run: it
starts without a wait, and attempts without progress are counted from there. With --first-must-step, a first
attempt that makes no step is not repeated, because the person who requested the run reads the error now. With
--wait, `settled` in outcome.json is set to true if no attempt follows. Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from trainer.health import attempt_history
from trainer.health.attempt_history import SETTLED

FIRST_WAIT_SECONDS = 5.0
# Not longer: an attempt waits one minute for the other hosts, and the attempts must overlap.
LONGEST_WAIT_SECONDS = 60.0
LIMIT = 30


class RestartDecision(NamedTuple):
    """Whether this host starts another attempt at a run.

    again: whether to start another attempt. reason: why, a sentence.
    fruitless: the number of attempts without progress, plus the one before them, which reached the furthest
        step. The count begins at the last attempt that a person requested. 0: not counted.
    wait_seconds: the wait before the next attempt.
    """

    again: bool
    reason: str
    fruitless: int = 0
    wait_seconds: float = 0.0


def judge(run_dir: Path, limit: int = LIMIT, first_must_step: bool = False) -> RestartDecision:
    """Decide whether to start another attempt at the run in `run_dir`. Writes nothing.

    limit: the number of attempts in a row without progress after which to give up. first_must_step: whether a
    first attempt without a step is not repeated.
    """
    ends = attempt_history.outcomes(run_dir)
    for kind in SETTLED:  # what is final for one rank of this host is final for all
        for end in ends:
            if end.get("outcome") == kind:
                return RestartDecision(False, f"{kind}: {_reason(end)}")
    if attempt_history.is_requested(run_dir):
        return RestartDecision(True, "This is the first attempt.")
    lines = attempt_history.history(run_dir)
    if line := attempt_history.unrecorded(run_dir):
        lines.append(line)
    (fruitless, furthest), last = _fruitless(lines), lines[-1] if lines else {}
    if first_must_step and last.get("requested") and not attempt_history.has_stepped(run_dir):
        return RestartDecision(False, f"The first attempt made no step: {_reason(last)}")
    why = f"The last attempt: {_reason(last)}"
    if fruitless > limit:
        stuck = f"{fruitless} attempts in a row did not get past step {furthest}."
        resume = f"`ansible-playbook train.yml -e run_id={run_dir.name}` starts the run again."
        return RestartDecision(False, f"{stuck} When the cause is corrected, {resume} {why}", fruitless)
    return RestartDecision(True, why, fruitless, wait_after(fruitless))


def judge_after_boot(run_dir: Path, limit: int = LIMIT) -> RestartDecision:
    """Decide whether to restart a run whose ranks SIGTERM has ended although nobody asked the run to stop.

    run_dir, limit: as for `judge`. An orderly shutdown of the host ends the ranks by SIGTERM, and so does
    systemd if the main process of their unit was killed: their outcome is `stopped` and not settled. This
    function deletes such outcome files. If the run directory has a file named stop, a person has asked the
    run to stop, and it is not restarted.
    """
    if (run_dir / "stop").exists():
        return RestartDecision(False, "stopped: the run was asked to stop before the host went down")
    for path in attempt_history.shutdowns(run_dir):
        path.unlink(missing_ok=True)
    return judge(run_dir, limit)


def judge_at_end(run_dir: Path, limit: int = LIMIT) -> RestartDecision:
    """Decide, when an attempt has ended, whether the run is to restart at the next boot. Writes nothing.

    run_dir, limit: as for `judge`. The run is to restart if SIGTERM has ended the attempt; else `judge`
    decides.
    """
    if attempt_history.shutdowns(run_dir):
        return RestartDecision(True, "The attempt was ended by SIGTERM, perhaps because its host goes down.")
    return judge(run_dir, limit)


def _reason(end: dict[str, Any]) -> str:
    return end.get("reason") or "no reason was given"


def wait_after(fruitless: int) -> float:
    """Seconds to wait before the next attempt: 0, 0, 5, 10, 20, 40, 60, 60 ... for `fruitless` from 0 on.

    fruitless: as in RestartDecision.
    """
    if fruitless < 2:
        return 0.0
    return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(fruitless - 2, 10))


def _fruitless(lines: list[dict[str, Any]]) -> tuple[int, int]:
    """(number of attempts since the run reached its furthest step, with the one that reached it; that step).

    lines: the lines of attempts.jsonl. Attempts before the last one that a person requested do not count.
    """
    count, furthest = 0, -1
    for line in lines:
        if line.get("requested"):
            count, furthest = 0, -1
        step = int(line.get("step") or 0)
        count = 1 if step > furthest else count + 1
        furthest = max(furthest, step)
    return count, max(furthest, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `again` to `parser`."""
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
        "--wait",
        action="store_true",
        help="sleep before the next attempt; if none follows, set `settled` in outcome.json",
    )
    parser.add_argument(
        "--at",
        choices=("restart", "boot", "end", "killed"),
        default="restart",
        help="when it decides. restart: before an attempt; boot: when the host has booted (a shutdown did "
        "not end the run); end: after an attempt, for the next boot; killed: after a process of the unit was "
        "killed, as for boot (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run `trainer again`: print the decision; returns 0 if another attempt is to start, else 1.

    With --wait, before another attempt: sleeps, then writes announced.json. With --wait, if no attempt
    follows: sets `settled` in outcome.json to true.
    """
    if args.at in ("boot", "killed"):
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
        attempt_history.announce(args.run_dir)
    elif args.wait:
        attempt_history.settle(args.run_dir)
    return 0 if decision.again else 1
