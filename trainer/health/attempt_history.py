"""The files of a run directory that record the attempts at a run on this host.

attempts.jsonl   one line for each ended attempt: outcome, reason, step, seconds
attempt.json     the running attempt; it is deleted when the attempt ends, so if it stays, the attempt was
                 killed
announced.json   an attempt that is to start; it is deleted when the attempt begins, so if it stays, the
                 attempt died while loading

Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from trainer.data.files import write_json
from trainer.health.status_record import RunStatusRecord

HISTORY, RUNNING, ANNOUNCED = "attempts.jsonl", "attempt.json", "announced.json"
SETTLED = ("final", "stopped", "finished")
# The keys of a line in attempts.jsonl that are in outcome.json too.
KEYS = ("run_id", "rank", "outcome", "reason", "step", "loss", "checkpoint", "seconds", "time")
LOG_BYTES = 1 << 16
RAISED = re.compile(r"^(?:\[[^]]*\]:? )?(?:\w+\.)*(\w+(?:Error|Exception)): (\S.*)$", re.MULTILINE)
# Raised by torchrun when the rendezvous fails.
RENDEZVOUS_ERRORS = ("DistStoreError", "DistNetworkError", "RendezvousTimeoutError")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Line = dict[str, Any]


def history(run_dir: Path) -> list[Line]:
    """The lines of attempts.jsonl in a run directory, the oldest first; damaged lines are left out.

    A line is a dict with the keys KEYS (outcome, reason, step and others), settled (whether no attempt
    follows), transfer (see OutcomeRecord), began (Unix time) and `requested` (whether a person requested the
    attempt). The line of an attempt that left no outcome has only some of these keys.
    """
    try:
        raw = (run_dir / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    lines = []
    for text in raw:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def outcomes(run_dir: Path) -> list[Line]:
    """The contents of the outcome files of all ranks of this host, dicts as in outcome.json."""
    return [end for path in sorted(run_dir.glob("outcome*.json")) if (end := _load(path))]


def shutdowns(run_dir: Path) -> list[Path]:
    """The paths of the outcome files of attempts that SIGTERM ended, perhaps because the host shut down."""
    paths = [(path, _load(path)) for path in run_dir.glob("outcome*.json")]
    return [path for path, end in paths if end.get("outcome") == "stopped" and not end.get("settled")]


def is_requested(run_dir: Path) -> bool:
    """Whether `run_dir` has no outcome, heartbeat or announced.json: the run was requested, not restarted."""
    names = ("outcome*.json", "heartbeat-*.json", ANNOUNCED)
    return not any(path for name in names for path in run_dir.glob(name))


def was_requested(run_dir: Path) -> bool:
    """Whether the running attempt was requested by a person; False for a restart."""
    return bool(_load(run_dir / RUNNING).get("requested", True))


def has_stepped(run_dir: Path) -> bool:
    """Whether a rank of this host made a step in its last attempt: its heartbeat file has a loss."""
    return any(heartbeat.loss is not None for heartbeat in _heartbeats(run_dir))


# -- the life of an attempt --------------------------------------------------------------------------------


def announce(run_dir: Path) -> None:
    """Write announced.json before an attempt starts, so that an attempt that fails while loading is counted.

    An earlier attempt that has no line in attempts.jsonl gets one, and its attempt.json is deleted. Errors of
    the disk are ignored.
    """
    content = {"began": time.time(), "requested": is_requested(run_dir)}
    with contextlib.suppress(OSError):  # the attempt itself reports a full disk
        if line := unrecorded(run_dir):
            _add(run_dir, line)
        (run_dir / RUNNING).unlink(missing_ok=True)
        write_json(run_dir / ANNOUNCED, content)


def begin(run_dir: Path) -> None:
    """Write attempt.json for the attempt that begins; adds an earlier killed attempt to attempts.jsonl.

    Call this before the outcome file of the earlier attempt is removed. Raises OSError if a file cannot be
    written.
    """
    announced = _load(run_dir / ANNOUNCED)
    if not announced and (killed := _killed_attempt(run_dir)):
        _add(run_dir, killed)
    running = {
        "pid": os.getpid(),
        "boot_id": _boot_id(),
        "began": time.time(),
        "requested": announced.get("requested", is_requested(run_dir)),
    }
    write_json(run_dir / RUNNING, running)
    (run_dir / ANNOUNCED).unlink(missing_ok=True)


def end(run_dir: Path, outcome: Line) -> None:
    """Add the running attempt to attempts.jsonl, and delete attempt.json.

    outcome: content of the attempt's outcome.json. Raises OSError if a file cannot be written.
    """
    line = {name: outcome.get(name) for name in (*KEYS, "settled", "transfer")}
    _add(run_dir, line | _start_of(_load(run_dir / RUNNING)))
    (run_dir / RUNNING).unlink(missing_ok=True)


def settle(run_dir: Path) -> None:
    """Set `settled` in outcome.json to true, because no attempt follows. Errors of the disk are ignored.

    If the attempt was killed and has no outcome.json, the file is written.
    """
    ends = outcomes(run_dir)
    known = [end for end in ends if end.get("outcome") in SETTLED]  # by another rank of this host, perhaps
    outcome = (known or ends or [unrecorded(run_dir)])[0]
    if outcome and not outcome.get("settled"):
        with contextlib.suppress(OSError):
            write_json(run_dir / "outcome.json", {**outcome, "settled": True})


# -- attempts without an outcome ---------------------------------------------------------------------------


def unrecorded(run_dir: Path) -> Line:
    """The line that attempts.jsonl lacks: that of an attempt that was killed or never began.

    It has some of the keys that `history` lists. {} if there is no such attempt.
    """
    announced = _load(run_dir / ANNOUNCED)
    if not announced:
        return _killed_attempt(run_dir)
    reason, ended_at = _end_of_log(run_dir / "train.log")
    step = int((history(run_dir) or [{}])[-1].get("step") or 0)
    ended = {"outcome": "retryable", "reason": reason, "step": step, **announced}
    return {**ended, "time": ended_at or announced.get("began")}


def _killed_attempt(run_dir: Path) -> Line:
    """The line for attempts.jsonl of an attempt that left no outcome; {} if there is no attempt.json."""
    running = _load(run_dir / RUNNING)
    if not running:
        return {}
    own = (heartbeat for heartbeat in _heartbeats(run_dir) if heartbeat.pid == running.get("pid"))
    last = next(own, RunStatusRecord())
    where = f"in {last.phase or 'load'} after step {last.step}"
    if running.get("boot_id") and running["boot_id"] != _boot_id():
        reason = f"Its host went down {where}."
    else:
        reason = (
            f"Killed by SIGKILL {where}: by hand, or by the kernel because memory ran out (to check, on that "
            "host: sudo dmesg | grep -i oom)."
        )
    began, seen = float(running.get("began") or 0), last.time or 0.0
    checkpoint = last.checkpoint["path"] if last.checkpoint else None
    seconds = round(max(0.0, seen - began), 3)
    values = (last.run_id or None, last.rank, "retryable", reason, last.step, last.loss, checkpoint, seconds)
    return dict(zip(KEYS, (*values, seen or began), strict=True)) | _start_of({**running, "began": began})


def _start_of(running: Line) -> Line:
    return {"began": running.get("began"), "requested": running.get("requested", False)}


def _end_of_log(log: Path) -> tuple[str, float | None]:
    """The last exception in the file `log` as a sentence, and the Unix time of the last write to the file.

    The time is None if the file cannot be read.
    """
    text, ended_at = "", None
    with contextlib.suppress(OSError), open(log, "rb") as file:
        ended_at = os.fstat(file.fileno()).st_mtime
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    raised = RAISED.findall(text.rpartition("\n=== ")[2])
    if not raised:
        reason = (
            "The attempt ended while it loaded. To see the reason: ansible-playbook logs.yml. If the log "
            "has none, the kernel may have killed it because memory ran out (to check, on that host: sudo "
            "dmesg | grep -i oom)."
        )
    elif raised[-1][0] in RENDEZVOUS_ERRORS:
        reason = f"The ranks did not connect to the rendezvous store: {raised[-1][1]}"
    else:
        reason = f"The attempt ended while it loaded: {raised[-1][0]}: {raised[-1][1]}"
    return reason, ended_at


# -- files -------------------------------------------------------------------------------------------------


def _add(run_dir: Path, line: Line) -> None:
    with open(run_dir / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _heartbeats(run_dir: Path) -> list[RunStatusRecord]:
    return [RunStatusRecord.load(_load(path)) for path in sorted(run_dir.glob("heartbeat-*.json"))]


def _load(path: Path) -> Line:
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
