"""The text of logs.yml and fetch.yml: the lines of all hosts by time, with the first error above them.

The lines come from the module run_log. The action plugin follow_log uses this file too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_report as report

Line = Mapping[str, Any]
LINES_AT_MOST = 50_000
"""The most that preflight allows (log_lines in roles/preflight/vars/declared_settings.yml)."""


def rendered(host: str, line: Line, dated: bool = False) -> str:
    """One line of the merged log: time, host:rank, text.

    host: the host that wrote the line. line: {"time", "rank", "text"} of the module run_log. dated: whether
    the time includes the date.
    """
    moment = line.get("time")
    form = "%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S"
    at = time.strftime(form, time.localtime(moment)) if moment else "-" * (19 if dated else 8)
    source = host if line.get("rank") is None else f"{host}:{line['rank']}"
    return f"{at} {source}  {line['text']}"


def merged_logs(
    by_host: Mapping[str, Mapping[str, Any]],
    run_id: str,
    newest: int = 100,
    states: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """The text of logs.yml: the newest lines of all hosts by time, with the outcome of the run at the end.

    by_host: {host: result of run_log}, in rank order. run_id: name of the run. newest: the most lines to
    show. states: {host: result of run_state}; None if the states were not read.
    """
    read = {host: result for host, result in by_host.items() if "lines" in result}
    lines = sorted(_timed(read), key=lambda entry: entry[0])[-newest:]
    times = [line["time"] for _, _, line in lines if line["time"]]
    dated = bool(times) and time.localtime(min(times))[:3] != time.localtime()[:3]
    shown = [rendered(host, line, dated) for _, host, line in lines]
    missing = []
    for host in by_host:
        if host not in read and (states or {}).get(host, {}).get("found") is False:
            missing.append(f"{host} does not have this run.")
        elif host not in read:
            missing.append(f"{host} did not answer; its log is not included.")
        elif read[host]["source"] == "file" and read[host]["lines"]:
            missing.append(
                f"{host}: no lines of this run in the journal; those of train.log are shown, without times."
            )
    error = _first_error(read, dated)
    if not shown:
        hint = "If the command has -e since=TIME, repeat it without."
        return "\n".join([*missing, f"There are no log lines of the run {run_id}. {hint}"])
    head = f"The newest {len(shown)} lines" if len(shown) == newest else f"{len(shown)} lines"
    more = f" (-e log_lines={min(10 * newest, LINES_AT_MOST)} for more)"
    more = more if len(shown) == newest < LINES_AT_MOST else ""
    ended = {host: state for host, state in (states or {}).items() if state.get("found") and state["ended"]}
    over = report.ending(ended)
    return report.screen([*missing, *error, f"Run {run_id}: {head.lower()}{more}", "", *shown, "", *over])


def _timed(read: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[float, str, Line]]:
    """(time, host, line) of every line. A line without a time has that of the previous line of its host."""
    for host, result in read.items():
        moment = 0.0
        for line in result["lines"]:
            moment = float(line["time"] or moment)
            yield moment, host, line


def _first_error(read: Mapping[str, Mapping[str, Any]], dated: bool) -> list[str]:
    """The lines of the earliest error on any host. Errors on other hosts usually follow from it."""
    errors = {host: result["error"] for host, result in read.items() if result.get("error")}
    if not errors:
        return []
    host = min(errors, key=lambda host: errors[host][0]["time"] or 0.0)
    return ["First error:", *(f"  {rendered(host, line, dated)}" for line in errors[host]), ""]


def fetched(
    by_host: Mapping[str, Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]], folder: str
) -> str:
    """The text that fetch.yml prints: files, size and folder of each host, and how to use a checkpoint.

    by_host: host -> result of the module run_files. states: host -> result of the module run_state. folder:
    the target on the controller.
    """
    lines = []
    for host, result in by_host.items():
        if "files" in result:
            n_bytes, count = result["bytes"], len(result["files"])
            size = f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.1f} kB"
            lines.append(f"{host}: {count} file{'s' * (count != 1)}, {size}, verified, in {folder}/{host}")
            checkpoint = f"{states[host].get('checkpoint')}/"
            if any(str(file["name"]).startswith(checkpoint) for file in result["files"]):
                path = f"{folder}/{host}/{states[host]['checkpoint']}"
                lines.append(f'  text from it: python -m trainer sample --checkpoint {path} --prompt "The "')
    return "\n".join(lines) or "No host has this run."
