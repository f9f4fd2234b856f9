#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the output of a run's unit on this host, from the journal or else from train.log."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.log_lines import (
    FRAME,
    TAIL_BYTES,
    attempt_of,
    first_error,
    is_error,
    lines_after,
    signal_text,
    without_torchrun_report,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import PREFIX
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    find_unit,
    is_up,
    own_scope,
    run,
    unit_name,
)

ERROR_LINES = 20
IN_FILE = "train.log:"
"""Begin of a cursor that is a position in train.log, not in the journal."""
SEARCHED = 2000
"""Lines that are searched for the first error; fewer may be returned."""
Line = dict[str, Any]
Entry = tuple[str, float | None]
"""A line's text and its time."""
STEP = re.compile(r"\[rank \d+\] step \d+/\d+ loss ")
"""How a rank reports a step (see trainer.tracking.reporter)."""
SPAN = re.compile(r"-?(\d+) ?([smhdw])(?:ecs?|econds?|ins?|inutes?|rs?|ours?|ays?|eeks?)?(?: ago)?")
MOMENT = re.compile(r"now|today|yesterday|@\d+|(\d{4}-\d\d-\d\d)?[ T]?(\d\d:\d\d(:\d\d)?)?")
RANK = re.compile(r"^\[rank (\d+)\] ?")


def since_words(given: Any) -> str:
    """The setting `since` in the syntax of journalctl's --since. A span such as 10min counts back from now.

    given: the setting, such as 10min or "2026-11-21 14:05"; "" for none. Raises ValueError for anything that
    is neither a span nor a moment.
    """
    text = str(given or "").strip()
    if not text:
        return ""
    if span := SPAN.fullmatch(text):
        return f"-{span[1]}{span[2]}"
    if MOMENT.fullmatch(text) and text != "T":
        return text.replace("T", " ")
    raise ValueError(
        f"since={text} is not a time. "
        "Give a span (10min, 2h, 1d) or a moment (today, 14:05, '2026-11-21 14:05')."
    )


def line_of(text: str, moment: float | None = None) -> Line:
    """A line of the log as {"time", "rank", "text"}.

    text: the line. moment: the Unix time of the line, None if unknown. In the result, `time` is `moment`,
    `rank` is the number in the prefix [rank N] that the trainer writes, None for a line without this prefix,
    and `text` is the line without the prefix.
    """
    found = RANK.match(text)
    rank = int(found.group(1)) if found else None
    return {"time": moment, "rank": rank, "text": text[found.end() :] if found else text}


def message(value: Any) -> str:
    """The text of the field MESSAGE of a journal entry.

    value: the field in the JSON of journalctl: a text, or a list of bytes if it is not printable UTF-8.
    """
    if isinstance(value, list):
        return bytes(value).decode("utf-8", "replace")
    return value or ""


def read_journal(params: dict[str, Any], count: int) -> tuple[list[Entry], str]:
    """Read lines of the run's unit from the journal. Returns ([(text, Unix time) of each line], cursor).

    params: options of the module, of which run_id, since and cursor are used. If params has a cursor, all
    lines after it are read. Else the newest lines are read, `count` at most; if `since` is set, only those
    after that time. The lines of the result are in the order of the journal. The cursor in the result is
    that of the last line; if no line was found or journalctl fails, that of params. Raises ValueError if
    journalctl refuses `since`.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--output=json", "--output-fields=MESSAGE"]
    command += ["--unit=" + unit_name(PREFIX + params["run_id"])]
    if own_scope() == "user":  # journalctl shows the lines of both
        command += ["--user-unit=" + unit_name(PREFIX + params["run_id"])]
    # Before systemd 254, --lines with --since and without --reverse selects the oldest lines.
    newest = ["--reverse", f"--lines={count}"]
    command += ["--after-cursor=" + params["cursor"]] if params["cursor"] else newest
    command += ["--since=" + params["since"]] if params["since"] and not params["cursor"] else []
    code, out, err = run(command)
    if code and params["since"] and "parse" in err.lower():
        raise ValueError(err)
    entries = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if not params["cursor"]:
        entries.reverse()
    lines: list[Entry] = [
        (message(entry.get("MESSAGE")), int(entry["__REALTIME_TIMESTAMP"]) / 1e6)
        for entry in entries
        if entry.get("MESSAGE") is not None
    ]
    return lines, entries[-1]["__CURSOR"] if entries else params["cursor"]


def read_file(path: str, cursor: str) -> tuple[list[Entry], str]:
    """Read the log file `path`. Returns ([(text, None) of each line], cursor).

    cursor: that of the last reading, then only later lines are read; "" to read the end of the file. Without
    a file, the result is ([], cursor).
    """
    try:
        start = int(cursor.removeprefix(IN_FILE)) if cursor else max(0, os.path.getsize(path) - TAIL_BYTES)
        texts, end = lines_after(path, start)
    except OSError:
        return [], cursor
    whole = texts[1:] if start and not cursor else texts  # the first line may have begun earlier
    return [(text, None) for text in whole], f"{IN_FILE}{end}"


def read(params: dict[str, Any]) -> dict[str, Any]:
    """Read the log of a run once; returns the result of the module. params: options of the module.

    Keys of the result:
    lines: the newest lines (see `line_of`), params["lines"] at most. error: the result of `error_of`.
    cursor: position of the last line in the journal or in train.log, for the next reading.
    source: "journal", or "file" if the lines are those of train.log.
    ended: whether the unit of the run is neither active nor about to start.
    """
    count = max(SEARCHED, params["lines"])
    lines: list[Entry] = []
    cursor, source = params["cursor"], "file" if params["cursor"].startswith(IN_FILE) else "journal"
    if source == "journal":
        lines, cursor = read_journal(params, count)
    if source == "file" or not (lines or params["cursor"] or params["since"]):
        source = "file"
        with acting_as(params["user"]):
            lines, cursor = read_file(os.path.join(params["run_dir"], "train.log"), cursor)
    texts = [text for text, _moment in lines]
    kept = [lines[index] for index in without_torchrun_report(texts)]
    kept = [line for line in kept if params["steps"] or not STEP.match(line[0])]
    unit = find_unit(PREFIX + params["run_id"], time.time())
    return {
        "lines": [line_of(*line) for line in kept[-params["lines"] :]],
        "error": error_of(lines, ERROR_LINES),
        "cursor": cursor,
        "source": source,
        "ended": not is_up(unit),
    }


def error_of(lines: list[Entry], count: int) -> list[Line]:
    """The first error of the last attempt, as lines (see `line_of`); [] if there is no error.

    lines: (text, Unix time) of each line of the log. count: the largest number of lines in the result.
    """
    lines = [line for line in lines if not FRAME.match(line[0])]
    texts = [text for text, _moment in lines]
    attempt = attempt_of(texts)
    if not any(is_error(text) for text in attempt):
        return []
    error = first_error(attempt, count)
    start = len(texts) - len(attempt)
    at = next(i for i in range(start, len(texts)) if texts[i : i + len(error)] == error)
    return [line_of(signal_text(text), moment) for text, moment in lines[at : at + len(error)]]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "run_id": {"type": "str", "required": True},
            "run_dir": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "since": {"type": "str", "default": ""},
            "lines": {"type": "int", "default": 100},
            "cursor": {"type": "str", "default": ""},
            "wait_seconds": {"type": "int", "default": 0},
            "steps": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        params["since"] = since_words(params["since"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    deadline = time.monotonic() + params["wait_seconds"]
    while True:
        try:
            found = read(params)
        except (OSError, RuntimeError, ValueError) as error:
            module.fail_json(msg=f"The log of {params['run_id']} cannot be read: {error}")
        if found["lines"] or found["ended"] or time.monotonic() >= deadline:
            module.exit_json(changed=False, **found)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
