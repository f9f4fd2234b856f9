"""The doctor's report: matrix and findings as text, and as one JSON object (schema in the README).

Pure functions of the measurements (see doctor_measured) and of findings (see doctor_hosts, doctor_links and
doctor_paths).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_hosts import host_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_links import link_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import can_rehearse
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_paths import path_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_plan import trainer_digest
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_report import table

SCHEMA = 2
Measured = Mapping[str, Mapping[str, Any]]
Finding = Mapping[str, str]


def examined(
    measured: Measured, hostvars: Mapping[str, Any], options: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The report, with all findings made from the measurements.

    options: those of host_findings, path_findings and link_findings. about: time, seconds, quick, forks.
    """
    options = {**options, "trainer": trainer_digest()}
    findings = [
        *host_findings(measured, hostvars, options),
        *path_findings(measured, options),
        *link_findings(measured, options),
    ]
    rehearsal = can_rehearse(list(measured), measured, int(about["forks"]))
    return report(measured, findings, {**about, "rehearsal": rehearsal})


def report(measured: Measured, findings: Sequence[Finding], about: Mapping[str, Any]) -> dict[str, Any]:
    """The report as an object for JSON. about: time, seconds, quick, rehearsal (result of can_rehearse)."""
    errors = [each for each in findings if each["severity"] == "error"]
    active = {host: of_host["active"] for host, of_host in measured.items() if of_host["active"]}
    return {
        "schema": SCHEMA,
        "time": about["time"],
        "seconds": round(float(about["seconds"]), 1),
        "quick": bool(about["quick"]),
        "good": not errors,
        "active_runs": active,
        "allreduce_mbit": _together(measured),
        "hosts": {host: _host(of_host) for host, of_host in measured.items()},
        "pairs": [_pair(measured, host, peer) for host in measured for peer in measured if host != peer],
        "findings": [dict(each) for each in sorted(findings, key=lambda each: each["severity"] != "error")],
        "not_measured": _not_measured(measured, active, about),
    }


def _host(of_host: Mapping[str, Any]) -> dict[str, Any]:
    facts, rehearsal = of_host["facts"], of_host["rehearsal"] or {}
    link = (facts.get("links") or {}).get(of_host["interface"]) or {}
    gemm = rehearsal.get("gemm_gflops") or {}
    names = (
        "cores",
        "cpu",
        "flags",
        "memory_gib",
        "copy_gb_s",
        "skew_s",
        "load",
        "python",
        "machine",
        "port_range",
        "disks",
    )
    return {
        "reachable": of_host["reachable"],
        "interface": of_host["interface"],
        "address": of_host["address"],
        "link": {name: link.get(name) for name in ("mtu", "speed_mbit", "duplex", "wireless")},
        **{name: facts.get(name) for name in names},
        "gemm_gflops": {"float32": gemm.get("float32"), "bfloat16": gemm.get("bfloat16")},
        "torch": (of_host["installed"] or {}).get("torch"),
    }


def _pair(measured: Measured, host: str, peer: str) -> dict[str, Any]:
    path = measured[host]["paths"].get(peer) or {}
    states = {port["state"] for port in path.get("ports") or []}
    return {
        "from": host,
        "to": peer,
        "route": path.get("route"),
        "ports": path.get("ports") or [],
        "open": states == {"open"},
        "rtt_ms": path.get("rtt_ms"),
        "mtu": path.get("mtu"),
        "mbit": _mbit(measured, host, peer),
        "allreduce_mbit": _allreduce(measured, host, peer),
    }


def _mbit(measured: Measured, host: str, peer: str) -> float | None:
    """Rate in Mbit/s from `host` to `peer`, whichever of them opened the connection; None if not measured."""
    for caller, called, name in ((host, peer, "sent_mbit"), (peer, host, "received_mbit")):
        rates = measured[caller]["rates"].get(called) or {}
        if name in rates:
            return float(rates[name])
    return None


def _allreduce(measured: Measured, host: str, peer: str) -> float | None:
    for of_host in (each for name, each in measured.items() if name in (host, peer)):
        rehearsal = of_host["rehearsal"] or {}
        together = rehearsal.get("hosts") or []
        if host in together and peer in together:
            a, b = sorted((together.index(host), together.index(peer)))
            if f"{a}-{b}" in (rehearsal.get("pairs") or {}):
                return float(rehearsal["pairs"][f"{a}-{b}"])
    return None


def _together(measured: Measured) -> float | None:
    rates = [(of_host["rehearsal"] or {}).get("allreduce_mbit") for of_host in measured.values()]
    return min((float(rate) for rate in rates if rate), default=None)


def _not_measured(measured: Measured, active: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    if about["quick"]:
        return ["rates, the all-reduce, GEMM and data (quick form; all of it: ansible-playbook doctor.yml)"]
    found = []
    if active:
        unit = next(iter(active.values()))[0]
        found.append(f"rates, memory, GEMM and the all-reduce, for {unit} is active and was not disturbed")
    elif about["rehearsal"].get("why"):
        what = (
            "the all-reduce"
            if any((each["rehearsal"] or {}).get("gemm_gflops") for each in measured.values())
            else "GEMM and the all-reduce"
        )
        found.append(f"{what} with every host: {about['rehearsal']['why']}")
    bare = [
        host
        for host, each in measured.items()
        if "manifest.json is missing" in ((each["data"] or {}).get("findings") or [])
    ]
    if bare:
        found.append(f"the data of {', '.join(bare)}: none are there yet (ansible-playbook setup.yml)")
    return found


# -- as text -------------------------------------------------------------------------------------------------


def text(report: Mapping[str, Any]) -> str:
    """The report as text: the matrix, what was not measured, one line per finding, and a summary."""
    findings = report["findings"]
    errors = sum(each["severity"] == "error" for each in findings)
    warnings = len(findings) - errors
    lines = [*matrix(report), ""]
    if report["not_measured"]:
        lines += [*(f"Not measured: {each}." for each in report["not_measured"]), ""]
    lines += [verdict(each) for each in findings]
    end = (
        "Nothing prevents"
        if report["good"]
        else f"{errors} finding{'s prevent' if errors > 1 else ' prevents'}"
    )
    also = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    lines.append(f"{end} training{also}. Checked for {report['seconds']:.0f} s; nothing was changed.")
    return "\n".join(line.rstrip() for line in lines)


def verdict(each: Finding) -> str:
    label = "FAULT" if each["severity"] == "error" else "warning"
    return f"{label}  {each['code']}  {each['host']}: {each['problem']} Fix: {each['remedy']}"


def matrix(report: Mapping[str, Any]) -> list[str]:
    """A table of hosts by hosts. A cell shows the path from row to column; on the diagonal, the host."""
    hosts = list(report["hosts"])
    pairs = {(pair["from"], pair["to"]): pair for pair in report["pairs"]}
    rows: list[list[str]] = []
    for host, of_host in report["hosts"].items():
        cells = [
            _own_cell(of_host) if host == peer else _path_cell(report, pairs[host, peer]) for peer in hosts
        ]
        lines = itertools.zip_longest(*cells, fillvalue="")
        rows += [["" if index else host, *line] for index, line in enumerate(lines)]
    return table(("from \\ to", *hosts), rows, numbers=())


def _own_cell(host: Mapping[str, Any]) -> list[str]:
    if not host["reachable"]:
        return ["does not answer"]
    if not host["cores"]:
        return ["not checked"]
    cores = f"{host['cores']} core{'s' if host['cores'] > 1 else ''}"
    memory = f", copies {host['copy_gb_s']:g} GB/s" if host["copy_gb_s"] else ""
    lines = [f"{host['interface'] or 'no interface'}: {cores}{memory}"]
    gemm = host["gemm_gflops"]
    if gemm["float32"]:
        narrow = f", bf16 {gemm['bfloat16']:.0f}" if gemm["bfloat16"] else ""
        lines.append(f"fp32 {gemm['float32']:.0f}{narrow} GFLOP/s")
    return lines


def _path_cell(report: Mapping[str, Any], pair: Mapping[str, Any]) -> list[str]:
    if not report["hosts"][pair["from"]]["reachable"] or not report["hosts"][pair["to"]]["reachable"]:
        return ["-"]
    if not pair["ports"]:
        return ["not probed"]
    lines = []
    shut: dict[str, list[str]] = {}
    for port in pair["ports"]:
        if port["state"] != "open":
            shut.setdefault(port["state"], []).append("store" if port["role"] == "store" else "Gloo")
    for state, roles in shut.items():
        lines.append(f"{' and '.join(dict.fromkeys(roles))} ports {state}")
    if pair["rtt_ms"]:
        mtu = pair["mtu"] or {}
        size = f", packets to {mtu['passes']}" if mtu else ""
        lines.append(f"{pair['rtt_ms']['median']:.2f} ms{size}")
    rates = [
        f"{_bits(pair['mbit'])}" if pair["mbit"] else "",
        f"all-reduce {_bits(pair['allreduce_mbit'])}" if pair["allreduce_mbit"] else "",
    ]
    if any(rates):
        lines.append(", ".join(each for each in rates if each))
    return lines


def _bits(mbit: float) -> str:
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 10_000 else f"{mbit:.0f} Mbit/s"
