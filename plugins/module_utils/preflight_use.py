"""Findings about the load, sleep, power and ports of a host, and about a unit file with the name of the run.

Facts are those of preflight_hosts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import holder
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import PREFIX

# Chassis types (SMBIOS) and names of hostnamectl for portable machines.
LAPTOPS = {"8", "9", "10", "11", "14", "30", "31", "32", "laptop", "convertible", "tablet"}
SLEEPS = {"suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate", "sleep", "poweroff", "halt"}
FULL = 0.9  # fraction of the port range in use, above which ranks may find no free port
USERS_OF_PORTS = {
    "store": "the rendezvous store of a run (TCPStore of torchrun)",
    "tracker": "the tracker (MLflow)",
}
LOGIND = "/etc/systemd/logind.conf.d/awake.conf"
Facts = Mapping[str, Any]


def use_findings(facts_by_host: Mapping[str, Facts], options: Mapping[str, Any]) -> list[Finding]:
    """All findings about the use of the hosts: ports in use, load, sleep, battery, unit files.

    facts_by_host: {host: facts of its probe}. options: a dict with holds_sleep (whether a run keeps its hosts
    awake while it computes).
    """
    findings: list[Finding] = []
    for host, facts in facts_by_host.items():
        if "unreachable" not in facts:
            findings += _ports(host, facts)
            findings += _unit(host, facts)
            findings += _load(host, facts)
            findings += _sleep(host, facts, bool(options["holds_sleep"]))
            findings += _battery(host, facts)
    return findings


def other_port(name: str) -> str:
    """The end of a fix: how to use another port for a server. name: store or tracker."""
    return (
        f"use another port: write {name}_port: PORT into group_vars/fleet.yml of the inventory, then: "
        "ansible-playbook setup.yml"
    )


def _process(text: str) -> dict[str, str]:
    """{"pid", "user", "unit", "command"} of the text `PID USER UNIT COMMAND` of root.sh.j2.

    Values that are not known are empty.
    """
    pid, user, unit, command = [*text.split(" ", 3), "", "", "", ""][:4]
    return {
        "pid": pid.strip("-"),
        "user": user,
        "unit": "" if unit == "-" else unit,
        "command": command.strip(),
    }


def _ports(host: str, facts: Facts) -> Iterator[Finding]:
    """Findings about processes that use the ports of a run.

    A refusal for another process on the port of the rendezvous store or of the tracker; units of nanofleet
    are left out, because the role launch decides about them. A warning if the fraction FULL of the ranks'
    port range is in use.
    """
    for line in facts["port"]:
        name, port, *rest = line.split(" ", 2)
        process = _process(" ".join(rest))
        if not process["unit"].startswith(PREFIX):
            who, end = holder(process, int(port))
            fix = f"{end}  (on {host}); or {other_port(name)}"
            owner = USERS_OF_PORTS[name]
            problem = f"Port {port}, which {owner} needs, is in use by {who}."
            yield finding("NF220", host, problem, fix)
    if facts.get("range"):
        span, used, most, *rest = facts["range"].split(" ", 3)
        low, high = map(int, span.split("-"))
        count = high - low + 1
        if int(used) >= FULL * count:
            process = _process(" ".join(rest))
            who, end = holder(process, low)
            held = f", {most} of them by {who}" if process["pid"] else ""
            fix = (
                f"{end}  (on {host})"
                if process["pid"]
                else (
                    "wait a minute, if they belong to closed connections (TIME-WAIT); they are listed by: "
                    f"sudo ss -Htanp 'sport >= :{low} and sport <= :{high}'  (on {host})"
                )
            )
            problem = (
                f"{used} of the {count} ports {span} of this host are in use{held}. The ranks of a run need "
                "free ports in this range."
            )
            yield warning("NF221", host, problem, fix)


def _unit(host: str, facts: Facts) -> Iterator[Finding]:
    """A refusal if a unit file has the name of the run's unit: no transient unit of that name can start."""
    path = str(facts.get("unit", ""))
    if path and "/transient/" not in path:
        name = Path(path).name
        problem = (
            f"A unit file {path} exists on this host, so systemd cannot start the run's own unit {name}."
        )
        remove = f"sudo rm {path} && sudo systemctl daemon-reload"
        if not facts.get("becomes", True):  # a unit of the user's own systemd
            remove = f"rm {path} && systemctl --user daemon-reload"
        fix = f"{remove}  (on {host}), or start a new run with another name: -e run_id=NAME"
        yield finding("NF407", host, problem, fix)


def _load(host: str, facts: Facts) -> Iterator[Finding]:
    """A warning if the load exceeds the number of cores and no run of nanofleet is active."""
    load, cores = float(facts.get("load", 0)), int(facts.get("cores", 0))
    if facts["active"] or not cores or load <= cores:
        return
    listed = [line.split(" ", 3) for line in facts["busy"] if line.count(" ") == 3]
    busy = [each for each in listed if each[1] != "1"]  # systemd itself is not to be ended
    who = ", ".join(f"{command} ({share} %, PID {pid} of {user})" for share, pid, user, command in busy)
    problem = (
        f"Other programs use the processor of this host{f': {who}' if who else ''}. The load is {load:g} on "
        f"{cores} core{'s' if cores > 1 else ''}, so training would be slow."
    )
    pid = busy[0][1] if busy else ""
    typed = (
        f"lower its priority: sudo renice -n 19 -p $(ls /proc/{pid}/task), or end it: sudo kill {pid}  (on "
        f"{host})"
        if busy
        else f"end programs that are not needed: sudo kill PID  (on {host}; top lists them with their PID)"
    )
    yield warning("NF120", host, problem, typed)


def _sleep(host: str, facts: Facts, holds_sleep: bool) -> Iterator[Finding]:
    """A warning if the host goes to sleep when its lid is closed or nobody uses it.

    holds_sleep: whether runs keep their hosts awake, which only a run whose unit belongs to root can do.
    """
    if "masked" in (facts.get("sleep"), facts.get("suspend")):
        return
    lid = facts.get("HandleLidSwitch", "")
    if _on_mains(facts):
        lid = facts.get("HandleLidSwitchExternalPower") or lid
    by_lid = lid in SLEEPS and (facts.get("chassis") in LAPTOPS or bool(facts["battery"]))
    by_idling = facts.get("IdleAction") in SLEEPS
    by_desktop = facts.get("desktop_idle") in SLEEPS
    causes = (["its lid is closed"] if by_lid else []) + (
        ["nobody uses it for a while"] if by_idling or by_desktop else []
    )
    if not causes:
        return
    then = "A run without root access cannot keep it awake."
    if not holds_sleep:
        then = "The setting launch_inhibit_sleep=false allows that during a run."
    elif facts.get("becomes"):
        then = "A run keeps it awake while it trains, but not while it waits to restart after a failure."
        if by_lid:
            then += " An elastic run continues without it when the lid is closed."
    keys = ["HandleLidSwitch", "HandleLidSwitchExternalPower"] if by_lid else []
    keys += ["IdleAction"] if by_idling else []
    lines = "".join(f"{key}=ignore\\n" for key in keys)
    commands = []
    if keys:
        commands.append(
            f"printf '[Login]\\n{lines}' | sudo install -D -m 644 /dev/stdin {LOGIND} && "
            "sudo systemctl kill -s HUP systemd-logind"
        )
    if by_desktop:
        commands.append(
            "gsettings set org.gnome.settings-daemon.plugins.power sleep-inactive-ac-type nothing"
        )
    problem = f"This host goes to sleep when {' or '.join(causes)}. {then}"
    yield warning("NF121", host, problem, f"{' && '.join(commands)}  (on {host})")


def _on_mains(facts: Facts) -> bool:
    return "1" in facts["mains"] or not facts["battery"]


def _battery(host: str, facts: Facts) -> Iterator[Finding]:
    if facts["battery"] and not _on_mains(facts) and "Discharging" in facts["battery"][0]:
        percent = facts["battery"][0].split()[-1]
        left = f", {percent} % full" if percent.isdigit() else ""
        fix = f"plug {host} in, or remove it from the inventory"
        yield warning(
            "NF122",
            host,
            f"This host runs on its battery{left}. It turns off when the battery is empty.",
            fix,
        )
