"""The doctor's report: matrix and findings as text, and as one JSON object (fields: roles/doctor/README.md).

Pure functions of the measurements (see doctor_measured) and of findings (see doctor_hosts, doctor_links and
doctor_paths).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_hosts import host_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_interfaces import made_interfaces
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_links import (
    directed_rates,
    link_findings,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import (
    can_rehearse,
    prediction,
    why_no_prediction,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_paths import path_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_report import table
from ansible_collections.nanofleet.fleet.trainer.code_digest import code_digest

SCHEMA = 2
Measured = Mapping[str, Mapping[str, Any]]
Finding = Mapping[str, str]
MISSING = "manifest.json is missing"
FACTS = (
    *("cores", "cpu", "flags", "memory_gib", "copy_gb_s", "skew_s"),
    *("load", "python", "machine", "port_range", "disks"),
)


def examined(
    measured: Measured, hostvars: Mapping[str, Any], options: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of the doctor as an object for JSON, with all findings that follow from the measurements.

    measured: host -> its measurements (see doctor_measured). hostvars: variables by host. options: the
    limits that host_findings, path_findings and link_findings take. about: time, seconds (duration of
    the check), quick (whether the check left out the slow measurements), forks (on how many hosts Ansible
    runs a task at once).
    """
    options = {**options, "trainer": code_digest()}
    findings = [
        *host_findings(measured, hostvars, options),
        *path_findings(measured, options),
        *link_findings(measured, options),
    ]
    rehearsal = can_rehearse(list(measured), measured, int(about["forks"]))
    return report(measured, findings, {**about, "rehearsal": rehearsal})


def report(measured: Measured, findings: Sequence[Finding], about: Mapping[str, Any]) -> dict[str, Any]:
    """The report of the doctor as an object for JSON, with these findings.

    measured: host -> its measurements (see doctor_measured). about: time, seconds (duration of the check),
    quick (whether the check left out the slow measurements), rehearsal (result of can_rehearse).
    """
    errors = [each for each in findings if each["severity"] == "error"]
    all_reduce_rates = [(of_host["rehearsal"] or {}).get("allreduce_mbit") for of_host in measured.values()]
    active = {host: of_host["active"] for host, of_host in measured.items() if of_host["active"]}
    return {
        "schema": SCHEMA,
        "time": about["time"],
        "seconds": round(float(about["seconds"]), 1),
        "quick": bool(about["quick"]),
        "good": not errors,
        "active_runs": active,
        "allreduce_mbit": min(filter(None, all_reduce_rates), default=None),
        "predicted": prediction(measured),
        "hosts": {host: _host(of_host) for host, of_host in measured.items()},
        "pairs": _pairs(measured),
        "findings": [dict(each) for each in sorted(findings, key=lambda each: each["severity"] != "error")],
        "not_measured": _not_measured(measured, active, about),
    }


def _host(of_host: Mapping[str, Any]) -> dict[str, Any]:
    facts = of_host["facts"]
    link = (facts.get("links") or {}).get(of_host["interface"]) or {}
    gemm = (of_host["rehearsal"] or {}).get("gemm_gflops") or {}
    return {
        "reachable": of_host["reachable"],
        "interface": of_host["interface"],
        "address": of_host["address"],
        "link": {name: link.get(name) for name in ("mtu", "speed_mbit", "duplex", "wireless")},
        "made_interfaces": made_interfaces(of_host),
        "wsl": facts.get("wsl") or None,
        **{name: facts.get(name) for name in FACTS},
        "gemm_gflops": {name: gemm.get(name) for name in ("float32", "bfloat16")},
        "torch": (of_host["installed"] or {}).get("torch"),
    }


def _pairs(measured: Measured) -> list[dict[str, Any]]:
    rates, all_reduce_rates = directed_rates(measured), _all_reduce_rates(measured)
    pairs = []
    for host, peer in itertools.permutations(measured, 2):
        path = measured[host]["paths"].get(peer) or {}
        ports = path.get("ports") or []
        pairs.append(
            {
                "from": host,
                "to": peer,
                "route": path.get("route"),
                "ports": ports,
                "open": {port["state"] for port in ports} == {"open"},
                "rtt_ms": path.get("rtt_ms"),
                "mtu": path.get("mtu"),
                "mbit": rates.get((host, peer)),
                "allreduce_mbit": all_reduce_rates.get(frozenset((host, peer))),
            }
        )
    return pairs


def _all_reduce_rates(measured: Measured) -> dict[frozenset[str], float]:
    """Effective bandwidths of all-reduces of two hosts in Mbit/s, by the set of the two."""
    rates: dict[frozenset[str], float] = {}
    for of_host in measured.values():
        rehearsal = of_host["rehearsal"] or {}
        for ranks, mbit in (rehearsal.get("pairs") or {}).items():
            hosts = frozenset(rehearsal["hosts"][int(rank)] for rank in ranks.split("-"))
            rates.setdefault(hosts, float(mbit))
    return rates


def _not_measured(measured: Measured, active: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    if about["quick"]:
        return ["rates, the all-reduce, GEMM and data (quick form; all of it: ansible-playbook doctor.yml)"]
    found = []
    if active:
        unit = next(iter(active.values()))[0]
        found.append(
            f"rates, memory, GEMM and the all-reduce, because {unit} is active "
            "(stop the run, then: ansible-playbook doctor.yml)"
        )
    elif about["rehearsal"].get("why"):
        has_gemm = any((each["rehearsal"] or {}).get("gemm_gflops") for each in measured.values())
        what = "the all-reduce" if has_gemm else "GEMM and the all-reduce"
        found.append(f"{what} with every host: {about['rehearsal']['why']}")
    if why := why_no_prediction(measured):
        found.append(f"the speed of a step: {why}")
    bare = [
        host for host, each in measured.items() if MISSING in ((each["data"] or {}).get("findings") or [])
    ]
    if bare:
        found.append(f"the data of {', '.join(bare)}: none are there yet (ansible-playbook setup.yml)")
    return found


# -- as text -------------------------------------------------------------------------------------------------


def text(report: Mapping[str, Any]) -> str:
    """A report as the text that doctor.yml prints: a table of the hosts, what was not measured, the findings.

    report: the result of `report`.
    """
    findings = report["findings"]
    errors = sum(each["severity"] == "error" for each in findings)
    warnings = len(findings) - errors
    missing = [f"Not measured: {each}." for each in report["not_measured"]]
    notes = [*missing, *_made_interfaces(report), *_wsl(report)]
    lines = [*matrix(report), "", *notes, *([""] if notes else [])]
    for each in findings:
        label = "FAULT" if each["severity"] == "error" else "warning"
        lines.append(f"{label}  {each['code']}  {each['host']}: {each['problem']} Fix: {each['remedy']}")
    end = f"{errors} finding{'s prevent' if errors > 1 else ' prevents'}" if errors else "Nothing prevents"
    also = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    lines.append(f"{end} training{also}. The check took {report['seconds']:.0f} s and changed nothing.")
    return "\n".join(line.rstrip() for line in lines)


def _made_interfaces(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each host with interfaces of VPNs, containers or virtual machines, on the path or not."""
    for host, of_host in report["hosts"].items():
        made = of_host["made_interfaces"]
        used = [f"{each['name']} ({each['program']}, MTU {each['mtu']})" for each in made if each["on_path"]]
        others = [f"{each['name']} ({each['program']})" for each in made if not each["on_path"]]
        sentences = [f"On the path of {host}: {', '.join(used)}."] if used else []
        where = "it" if used else f"the path of {host}"
        sentences += [f"Not on {where}: {', '.join(others)}."] if others else []
        if sentences:
            yield " ".join(sentences)


def _wsl(report: Mapping[str, Any]) -> Iterator[str]:
    for host, of_host in report["hosts"].items():
        if of_host["wsl"]:
            yield f"{host} is WSL2 on Windows; its networking mode is {of_host['wsl']}."


def matrix(report: Mapping[str, Any]) -> list[str]:
    """The lines of a table with a row and a column for each host.

    A cell shows the path from the host of its row to the host of its column. The cells on the diagonal show
    the figures of the host itself. report: the result of `report`.
    """
    cells = {(host, host): _host_cell(of_host) for host, of_host in report["hosts"].items()}
    for pair in report["pairs"]:
        is_reachable = all(report["hosts"][pair[end]]["reachable"] for end in ("from", "to"))
        cells[pair["from"], pair["to"]] = _path_cell(pair) if is_reachable else ["-"]
    hosts = list(report["hosts"])
    rows: list[list[str]] = []
    for host in hosts:
        lines = itertools.zip_longest(*(cells[host, peer] for peer in hosts), fillvalue="")
        rows += [["" if index else host, *line] for index, line in enumerate(lines)]
    return table(("from \\ to", *hosts), rows, numbers=())


def _host_cell(host: Mapping[str, Any]) -> list[str]:
    if not (host["reachable"] and host["cores"]):
        return ["not checked" if host["reachable"] else "does not answer"]
    cores = f"{host['cores']} core{'s' if host['cores'] > 1 else ''}"
    memory = f", copies {host['copy_gb_s']:g} GB/s" if host["copy_gb_s"] else ""
    lines = [f"{host['interface'] or 'no interface'}: {cores}{memory}"]
    gemm = host["gemm_gflops"]
    if gemm["float32"]:
        narrow = f", bf16 {gemm['bfloat16']:.0f}" if gemm["bfloat16"] else ""
        lines.append(f"fp32 {gemm['float32']:.0f}{narrow} GFLOP/s")
    return lines


def _path_cell(pair: Mapping[str, Any]) -> list[str]:
    if not pair["ports"]:
        return ["not probed"]
    closed: dict[str, dict[str, None]] = {}  # state -> names of ports
    for port in pair["ports"]:
        if port["state"] != "open":
            closed.setdefault(port["state"], {})["store" if port["role"] == "store" else "Gloo"] = None
    lines = [f"{' and '.join(roles)} ports {state}" for state, roles in closed.items()]
    if pair["rtt_ms"]:
        size = f", packets to {pair['mtu']['passes']}" if pair["mtu"] else ""
        lines.append(f"{pair['rtt_ms']['median']:.2f} ms{size}")
    rates = {"": pair["mbit"], "all-reduce ": pair["allreduce_mbit"]}
    shown = ", ".join(f"{name}{_bits(mbit)}" for name, mbit in rates.items() if mbit)
    return [*lines, shown] if shown else lines


def _bits(mbit: float) -> str:
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 10_000 else f"{mbit:.0f} Mbit/s"
