"""Findings, and the table that shows them. Used on the controller only.

A finding is a dict with the keys
    code        code of the message
    host        the host, setting or option that the finding is about
    problem     what is wrong and why, one or more sentences
    remedy      the fix
    severity    refusal (stops the command), error (prevents training) or warning (stops nothing)
    peer        only in findings of the doctor: the host at the other end of the path

A code belongs to one message and is never used for another message: NF0xx settings and inventory, NF1xx
hosts, NF2xx network, NF3xx environments, NF4xx runs, NF5xx doctor, NF6xx data and tracker, NF7xx lab. A task
that fails has the code before its message, as in `NF602: tower has no rsync ...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mode
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed

Finding = dict[str, str]
UNCHANGED = "nothing was changed"


def finding(code: str, host: str, problem: str, remedy: str, severity: str = "refusal") -> Finding:
    """A finding as a dict with code, host, problem, remedy and severity (see the top of this file).

    code: the code of the message. host: the host, setting or option that the finding is about. problem: what
    is wrong and why, one or more sentences. remedy: the fix. severity: refusal (stops the command), error
    (prevents training) or warning (stops nothing).
    """
    return {"code": code, "host": host, "problem": problem, "remedy": remedy, "severity": severity}


def warning(code: str, host: str, problem: str, remedy: str) -> Finding:
    """A finding with the severity warning, which stops nothing. Arguments: as for `finding`."""
    return finding(code, host, problem, remedy, "warning")


def doctor_finding(
    code: str, host: str, problem: str, remedy: str, peer: str = "", severity: str = "error"
) -> Finding:
    """A finding of the doctor: the keys of `finding`, and peer.

    code, host, problem, remedy, severity: as for `finding`. peer: host at the other end of the path; "" if
    the finding is not about a path.
    """
    return {**finding(code, host, problem, remedy, severity), "peer": peer}


def unlike_most(values: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The hosts without the most frequent value, as tuples (host, its value, the most frequent value).

    values: {host: value}. Of equally frequent values the first in `values` counts: of two hosts that differ,
    the result has the second one.
    """
    usual = mode(values.values()) if values else ""
    return [(host, value, usual) for host, value in values.items() if value != usual]


def reported(findings: Sequence[Finding], state: str = UNCHANGED) -> dict[str, Any]:
    """The result of an action plugin that has made these findings.

    If a finding stops the command, the result is failed and its msg is the table. Else it is
    {"findings", "message"}, and message is the table. state: what was done to the hosts so far, for the first
    line of the table.
    """
    shown = as_typed(table(findings, state))
    if refusals(findings):
        return {"failed": True, "msg": shown}
    return {"findings": findings, "message": shown}


def refusals(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that stop the command: all except warnings."""
    return [f for f in findings if f["severity"] != "warning"]


def table(findings: Sequence[Finding], state: str = UNCHANGED) -> str:
    """The findings as aligned lines, refusals first; after each finding comes its fix.

    state: what was done to the hosts so far, for the first line.
    """
    width = max((len(f["host"]) for f in findings), default=0)
    stops = refusals(findings)
    warnings = [f for f in findings if f not in stops]
    lines = []
    if stops:
        lines.append(f"{_count(stops, 'finding')}; {state}.")
        lines += _lines(stops, width)
    if warnings:
        lines.append(f"{_count(warnings, 'warning')}{'' if stops else '; the command continues'}.")
        lines += _lines(warnings, width)
    return "\n".join(lines)


def _count(things: Sequence[Finding], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _lines(findings: Sequence[Finding], width: int) -> list[str]:
    lines = []
    for each in findings:
        lines.append(f"{each['code']}  {each['host']:<{width}}  {each['problem']}")
        lines.append(f"{'':{len(each['code'])}}  {'':<{width}}  Fix: {each['remedy']}")
    return lines
