"""Findings, and the table that shows them. Used on the controller only.

A finding is {"host", "problem", "remedy", "severity"}: where, one sentence, what to type next, and whether it
stops the command (refusal), prevents training (error) or is only reported (warning). The doctor's also have
"kind" and "peer".
"""

from __future__ import annotations

from collections.abc import Mapping

Finding = dict[str, str]


def finding(host: str, problem: str, remedy: str, severity: str = "refusal") -> Finding:
    """A finding that stops the command, unless it is a warning."""
    return {"host": host, "problem": problem, "remedy": remedy, "severity": severity}


def warning(host: str, problem: str, remedy: str) -> Finding:
    """A finding that is only reported."""
    return finding(host, problem, remedy, "warning")


def doctor_finding(
    kind: str, host: str, problem: str, remedy: str, peer: str = "", severity: str = "error"
) -> Finding:
    """A finding of the doctor: `kind` names what is wrong, `peer` the host at the other end of a path."""
    return {
        "kind": kind, "host": host, "peer": peer, "severity": severity, "problem": problem, "remedy": remedy,
    }  # fmt: skip


def refusals(findings: list[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Those that stop the command."""
    return [f for f in findings if f.get("severity") != "warning"]


def table(findings: list[Mapping[str, str]]) -> str:
    """All findings as aligned lines, refusals first, each followed by what to type next."""
    width = max((len(f["host"]) for f in findings), default=0)
    stops = refusals(findings)
    tells = [f for f in findings if f not in stops]
    lines = []
    if stops:
        lines.append(f"{_count(stops, 'finding')}; nothing was changed.")
        lines += _lines(stops, width)
    if tells:
        lines.append(f"{_count(tells, 'warning')}; nothing stops for {'it' if len(tells) == 1 else 'them'}.")
        lines += _lines(tells, width)
    return "\n".join(lines)


def _count(things: list[Mapping[str, str]], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _lines(findings: list[Mapping[str, str]], width: int) -> list[str]:
    pairs = [
        (f"{f['host']:<{width}}  {f['problem']}", f"{'':<{width}}  Type: {f['remedy']}") for f in findings
    ]
    return [line for pair in pairs for line in pair]
