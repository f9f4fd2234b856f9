# SPDX-License-Identifier: MIT
"""Reads the directory of a run on this host (heartbeats, metrics, outcome, checkpoints); lists all runs.

Read-only, standard library only. Used on the hosts by the modules run_state, launch_state and end_run.
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
    signal_text,
    tail,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import unit_of_run
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    Unit,
    between_attempts,
    booted,
    is_missing,
    is_up,
    process_state,
)

ATTEMPTS = 20
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of runs that preflight allows; a folder with another name is not a run."""
LEFTOVER = re.compile(r"outcome(-\d+)?\.json|heartbeat-\d+\.json|announced\.json|prediction\.txt|stop")


def names_in(folder: str) -> list[str]:
    """The names of the files in a folder, sorted; [] if the folder is missing or cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def json_lines(path: str) -> list[dict[str, Any]]:
    """The JSON objects in the last 256 KiB of a file that has one per line, in the order of the file.

    Lines that are no JSON object are ignored. The result is [] if the file cannot be read.
    """
    found = []
    for line in tail(path):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            found += [entry] if isinstance(entry, dict) else []
    return found


def heartbeats(run_dir: str, now: float, unit: Unit) -> list[dict[str, Any]]:
    """The run status of each rank on this host, from the files heartbeat-RANK.json, in rank order.

    run_dir: the directory of the run. now: Unix time. unit: the state of the run's unit (see read_unit). A
    run status has the fields of RunStatusRecord.heartbeat, and over (whether the rank has ended), process
    (the state of the rank's process), before (whether the run status is of an earlier attempt) and age
    (seconds since the run status was written).
    """
    found = []
    # The next attempt removes the outcomes when it begins.
    outcomes = [name for name in names_in(run_dir) if re.fullmatch(r"outcome(-\d+)?\.json", name)]
    ended = {(load_json(os.path.join(run_dir, name)) or {}).get("rank") for name in outcomes}
    began = unit["since"] if unit["sub_state"] == "running" and unit["since"] else 0.0
    # torchrun may end later than its ranks.
    ending = between_attempts(unit) or unit["active_state"] == "deactivating" or not is_up(unit)
    for name in names_in(run_dir):
        if not re.fullmatch(r"heartbeat-\d+\.json", name):
            continue
        if status := load_json(os.path.join(run_dir, name)):
            pid, written = status.get("pid"), float(status.get("time") or now)
            missing = pid is not None and is_missing(pid)
            status["over"] = ending or missing or status.get("rank", 0) in ended
            status["process"] = process_state(pid) if pid is not None else ""
            status["before"] = written < began - 1
            status["age"] = round(max(0.0, now - written), 1)
            found.append(status)
    return sorted(found, key=lambda status: status.get("rank") or 0)


def newest_checkpoint(run_dir: str) -> tuple[str | None, float | None]:
    """The newest complete checkpoint of a run: (its path below `run_dir`, Unix time at which it was written).

    The result is (None, None) if there is no complete checkpoint. A complete checkpoint has meta.json, which
    is written last.
    """
    folder = os.path.join(run_dir, "checkpoints")
    for name in reversed(checkpoint_names(folder)):
        with contextlib.suppress(OSError):
            return "checkpoints/" + name, os.stat(os.path.join(folder, name, "meta.json")).st_mtime
    return None, None


def checkpoint_names(folder: str) -> list[str]:
    """The names of the checkpoints in a folder, step_NNNNNN, by their steps."""
    names = [name for name in names_in(folder) if re.fullmatch(r"step_[0-9]+", name)]
    return sorted(names, key=lambda name: int(name.removeprefix("step_")))


def rebooted_since(
    run_dir: str, unit: Unit, statuses: list[dict[str, Any]], outcome: dict[str, Any], now: float
) -> float | None:
    """The Unix time of this host's boot, if the boot ended an attempt that nobody had stopped; else None.

    run_dir: the directory of the run. unit: the state of its unit (see read_unit). statuses: the result of
    `heartbeats`. outcome: the content of outcome.json. now: Unix time.
    """
    begun = [load_json(os.path.join(run_dir, name)) or {} for name in ("attempt.json", "announced.json")]
    times = [*(one.get("time") for one in [*statuses, outcome]), *(one.get("began") for one in begun)]
    last = max((float(moment) for moment in times if moment), default=None)
    boot = booted(now)
    inactive = not is_up(unit) and unit["active_state"] != "failed" and not outcome.get("settled")
    return boot if inactive and last and boot and last < boot else None


def links(run_dir: str) -> dict[str, str]:
    """{path: target} of the symbolic links in a run directory, except links with the name of a leftover file.

    A run must not start while there are such links, because the run would overwrite their targets.
    """
    found = {}
    for path in (os.path.join(run_dir, name) for name in names_in(run_dir) if not LEFTOVER.fullmatch(name)):
        if os.path.islink(path):
            with contextlib.suppress(OSError):
                found[path] = os.readlink(path)
    return found


def _modified(path: str) -> float:
    """The Unix time of the last write of a file; 0.0 if it has been deleted since its name was read."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def known_runs(runs_dir: str, active: list[str]) -> list[dict[str, Any]]:
    """The runs of this host as dicts, the last written first; at most 20. [] if this user may not read them.

    runs_dir: the folder of the run directories. active: names of the active units of runs. Keys of a run:
    run_id, time (Unix time of the last write), active, hosts and config (of run.json), and outcome, reason,
    settled, step, num_iterations and tok_per_s (of outcome.json; None if that file is missing).
    """
    found = []
    for name in filter(RUN_ID.fullmatch, names_in(runs_dir)):
        run_dir = os.path.join(runs_dir, name)
        if os.path.exists(os.path.join(run_dir, "run.json")):
            # The last written file counts: a resumed run is newer than one that was started after it.
            written = [os.path.join(run_dir, each) for each in names_in(run_dir) if each.endswith(".json")]
            found.append((max(map(_modified, written)), name))
    runs = []
    for moment, run_id in sorted(found, reverse=True)[:20]:
        run_dir = os.path.join(runs_dir, run_id)
        outcome = load_json(os.path.join(run_dir, "outcome.json")) or {}
        described = load_json(os.path.join(run_dir, "run.json")) or {}
        runs.append(
            {
                "run_id": run_id,
                "time": moment,
                "active": unit_of_run(run_id) in active,
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
    """The part of the result of the module run_state that is read from a run directory, as a dict.

    unit: the state of the run's unit (see read_unit). now: Unix time. log_lines: the most lines of an error
    in the log. The keys are described in plugins/modules/run_state.yml. Without run.json, `found` is False
    and the other values are empty.
    """
    found = os.path.exists(os.path.join(run_dir, "run.json"))
    run_dir = run_dir if found else os.devnull
    statuses = heartbeats(run_dir, now, unit)
    outcome = load_json(os.path.join(run_dir, "outcome.json"))
    metrics = json_lines(os.path.join(run_dir, "metrics.jsonl"))[::-1]
    log = tail(os.path.join(run_dir, "train.log"))
    rebooted = rebooted_since(run_dir, unit, statuses, outcome or {}, now)
    lost = not is_up(unit) and outcome is None and not rebooted
    failed = found and (unit["active_state"] == "failed" or lost)
    checkpoint, checkpoint_time = newest_checkpoint(run_dir)
    unsuccessful = not is_up(unit) and (outcome or {}).get("outcome") in ("retryable", "final")
    has_error = ((failed or unsuccessful) and not rebooted) or between_attempts(unit)
    return {
        "found": found,
        "failed_unit": failed,
        "rebooted": rebooted,
        "stepped": any(status.get("loss") is not None and not status["before"] for status in statuses),
        "heartbeats": statuses,
        "metrics": next((entry for entry in metrics if "loss" in entry), None),
        "evaluation": next((entry for entry in metrics if "val_bpb" in entry), None),
        "outcome": outcome,
        "stop_requested": os.path.exists(os.path.join(run_dir, "stop")),
        "error": [signal_text(line) for line in first_error(attempt_of(log), log_lines)] if has_error else [],
        "run_file": load_json(os.path.join(run_dir, "run.json")),
        "prediction": "\n".join(tail(os.path.join(run_dir, "prediction.txt"))),
        "checkpoint": checkpoint,
        "checkpoint_time": checkpoint_time,
        "leftovers": [name for name in names_in(run_dir) if LEFTOVER.fullmatch(name)],
        "links": links(run_dir),
        "past_attempts": json_lines(os.path.join(run_dir, "attempts.jsonl"))[-ATTEMPTS:],
        "began": (load_json(os.path.join(run_dir, "attempt.json")) or {}).get("began"),
    }
