# SPDX-License-Identifier: MIT
"""Reads the directory of a run on this host (heartbeats, metrics, outcome, checkpoints); lists all runs.

Read-only, standard library only. Used on the hosts by the module run_state.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json
from ansible_collections.nanofleet.fleet.plugins.module_utils.log_lines import (
    attempt_of,
    first_error,
    in_words,
    tail,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    Unit,
    between_attempts,
    booted,
    is_missing,
    is_up,
    process_state,
)

PREFIX = "nanofleet-"
ATTEMPTS = 20
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of runs that preflight allows; a folder with another name is not a run."""
LEFTOVER = re.compile(r"outcome(-\d+)?\.json|heartbeat-\d+\.json|announced\.json|prediction\.txt|stop")


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; none where it is missing or may not be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def last_with(path: str, key: str) -> dict[str, Any] | None:
    """The last JSON line of a file that has the key `key`; None without one."""
    for line in reversed(tail(path)):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and key in entry:
            return entry
    return None


def attempts(path: str) -> list[dict[str, Any]]:
    """The last 20 attempts that the trainer recorded in attempts.jsonl (`path`), oldest first."""
    found = []
    for line in tail(path)[-ATTEMPTS:]:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            found += [entry] if isinstance(entry, dict) else []
    return found


def ended_ranks(run_dir: str) -> set[Any]:
    """The ranks whose attempt is over: the next one takes their outcome away as it begins."""
    names = [name for name in names_in(run_dir) if re.fullmatch(r"outcome(-\d+)?\.json", name)]
    return {(load_json(os.path.join(run_dir, name)) or {}).get("rank") for name in names}


def heartbeats(run_dir: str, now: float, unit: Unit) -> list[dict[str, Any]]:
    """Each heartbeat-RANK.json as a dict, in rank order. now: Unix time.

    It also has over (the rank has ended), process (process_state), before (it is of an earlier attempt) and
    age (seconds since it was written).
    """
    found = []
    ended = ended_ranks(run_dir)
    # torchrun may take its time to end after its ranks have.
    ends = between_attempts(unit) or unit["active_state"] == "deactivating" or not is_up(unit)
    for name in names_in(run_dir):
        beat = load_json(os.path.join(run_dir, name)) if re.fullmatch(r"heartbeat-\d+\.json", name) else None
        if beat:
            gone = beat.get("pid") is not None and is_missing(beat["pid"])
            beat["over"] = ends or gone or beat.get("rank", 0) in ended
            beat["process"] = process_state(beat["pid"]) if beat.get("pid") is not None else ""
            began = unit["since"] if unit["sub_state"] == "running" and unit["since"] else 0.0
            beat["before"] = float(beat.get("time") or now) < began - 1
            beat["age"] = round(max(0.0, now - float(beat.get("time") or now)), 1)
            found.append(beat)
    return sorted(found, key=lambda beat: beat.get("rank") or 0)


def newest_checkpoint(run_dir: str) -> str | None:
    """The newest complete checkpoint, as a path relative to `run_dir`; None without one.

    A complete checkpoint has meta.json, which is written last.
    """
    folder = os.path.join(run_dir, "checkpoints")
    for name in reversed(names_in(folder)):
        if re.fullmatch(r"step_[0-9]+", name) and os.path.exists(os.path.join(folder, name, "meta.json")):
            return "checkpoints/" + name
    return None


def rebooted_since(
    run_dir: str, unit: Unit, beats: list[dict[str, Any]], outcome: dict[str, Any], now: float
) -> float | None:
    """Unix time of this host's boot, if the boot ended an attempt that nobody had stopped; else None."""
    begun = [load_json(os.path.join(run_dir, name)) or {} for name in ("attempt.json", "announced.json")]
    signs = [*(beat.get("time") for beat in beats), outcome.get("time"), *(one.get("began") for one in begun)]
    last = max((float(sign) for sign in signs if sign), default=None)
    up_since = booted(now)
    gone = not is_up(unit) and unit["active_state"] != "failed" and not outcome.get("settled")
    return up_since if gone and last and up_since and last < up_since else None


def links(run_dir: str) -> dict[str, str]:
    """{path: target} of the symbolic links in the run directory, to which a run writes only real files."""
    found = {}
    for path in (os.path.join(run_dir, name) for name in names_in(run_dir) if not LEFTOVER.fullmatch(name)):
        if os.path.islink(path):
            with contextlib.suppress(OSError):
                found[path] = os.readlink(path)
    return found


def modified(path: str) -> float | None:
    """Unix time of a file's last modification; None if the file does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def last_sign(run_dir: str) -> float:
    """When a run last wrote one of its own files: a resumed run is newer than one that was made after it."""
    names = [name for name in names_in(run_dir) if name.endswith(".json")]
    return max(os.lstat(os.path.join(run_dir, name)).st_mtime for name in names)


def known_runs(runs_dir: str, active: list[str]) -> list[dict[str, Any]]:
    """The runs of this host, the last written first; at most 20. A user who may not read them gets none."""
    found = []
    for name in filter(RUN_ID.fullmatch, names_in(runs_dir)):
        run_dir = os.path.join(runs_dir, name)
        if os.path.exists(os.path.join(run_dir, "run.json")):
            found.append((last_sign(run_dir), name))
    runs = []
    for moment, run_id in sorted(found, reverse=True)[:20]:
        run_dir = os.path.join(runs_dir, run_id)
        outcome = load_json(os.path.join(run_dir, "outcome.json")) or {}
        described = load_json(os.path.join(run_dir, "run.json")) or {}
        runs.append(
            {
                "run_id": run_id,
                "time": moment,
                "active": PREFIX + run_id + ".service" in active,
                "hosts": described.get("hosts"),
                "config": described.get("config"),
                **{
                    key: outcome.get(key)
                    for key in ("outcome", "reason", "settled", "step", "num_iterations", "tok_per_s")
                },
            }
        )
    return runs


def read_run(run_dir: str, unit: Unit, now: float, log_lines: int) -> dict[str, Any]:
    """What the run directory holds; a folder without run.json is no run, and nothing in it counts."""
    found = os.path.exists(os.path.join(run_dir, "run.json"))
    run_dir = run_dir if found else os.devnull
    beats = heartbeats(run_dir, now, unit)
    outcome = load_json(os.path.join(run_dir, "outcome.json"))
    metrics = os.path.join(run_dir, "metrics.jsonl")
    log = tail(os.path.join(run_dir, "train.log"))
    rebooted = rebooted_since(run_dir, unit, beats, outcome or {}, now)
    lost = not is_up(unit) and outcome is None and not rebooted
    failed = found and (unit["active_state"] == "failed" or lost)
    checkpoint = newest_checkpoint(run_dir)
    bad = failed or (not is_up(unit) and (outcome or {}).get("outcome") in ("retryable", "final"))
    bad = (bad and not rebooted) or between_attempts(unit)
    return {
        "found": found,
        "failed_unit": failed,
        "rebooted": rebooted,
        "stepped": any(beat.get("loss") is not None and not beat["before"] for beat in beats),
        "heartbeats": beats,
        "metrics": last_with(metrics, "loss"),
        "evaluation": last_with(metrics, "val_bpb"),
        "outcome": outcome,
        "stop_requested": os.path.exists(os.path.join(run_dir, "stop")),
        "error": [in_words(line) for line in first_error(attempt_of(log), log_lines)] if bad else [],
        "run_file": load_json(os.path.join(run_dir, "run.json")),
        "prediction": "\n".join(tail(os.path.join(run_dir, "prediction.txt"))),
        "checkpoint": checkpoint,
        "checkpoint_time": modified(os.path.join(run_dir, checkpoint, "meta.json")) if checkpoint else None,
        "leftovers": [name for name in names_in(run_dir) if LEFTOVER.fullmatch(name)],
        "links": links(run_dir),
        "past_attempts": attempts(os.path.join(run_dir, "attempts.jsonl")),
        "began": (load_json(os.path.join(run_dir, "attempt.json")) or {}).get("began"),
    }
