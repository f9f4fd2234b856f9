"""Messages of the action run_plan about hosts that are not set up or whose environments differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def not_set_up(environments: Mapping[str, Any], manifests: Mapping[str, str]) -> str:
    """A message about the hosts that lack the environment or the dataset; "" if none does.

    environments: host -> installed environment, or empty. manifests: host -> digest of its manifest, or "".
    """
    lacks = {
        "Python environment": [host for host, installed in environments.items() if not installed],
        "dataset": [host for host in environments if not manifests[host]],
    }
    sentences = [f"No {what} on {', '.join(hosts)}." for what, hosts in lacks.items() if hosts]
    return " ".join([*sentences, "Set it up: ansible-playbook setup.yml"]) if sentences else ""


def skew(installed: Mapping[str, Mapping[str, str]], digest: str) -> str:
    """A message about differences between the hosts' installations; "" if there are none.

    installed: host -> what installed_environment read there; digest: of this checkout's trainer.
    """
    differences = []
    for field in dict.fromkeys(name for facts in installed.values() for name in facts):
        for values in by_kind(installed, field) if field != "machine" else ():
            hosts: dict[str, list[str]] = {}
            for host, value in values.items():
                hosts.setdefault(value, []).append(host)
            if len(hosts) > 1:
                shown = "; ".join(f"{value[:12]} on {', '.join(where)}" for value, where in hosts.items())
                differences.append(f"{field} is {shown}")
    if differences:
        differing = ", and ".join(differences)
        return (
            f"The hosts differ in what is installed: {differing}. Make them equal: ansible-playbook setup.yml"
        )
    if any(facts.get("trainer") != digest for facts in installed.values()):
        return (
            "The trainer on the hosts is another trainer than the one in this folder. Update the hosts: "
            "ansible-playbook setup.yml"
        )
    return ""


def by_kind(installed: Mapping[str, Mapping[str, str]], field: str) -> list[dict[str, str]]:
    """The values of a field by host, in groups of hosts that must not differ in it.

    One environment is one lock's, and each Python, machine and build of torch has its own; a build is not a
    version, so 2.13.0+cpu trains with 2.13.0+cu130.
    """
    kinds: dict[tuple[str, ...], dict[str, str]] = {}
    for host, facts in installed.items():
        python, (version, _plus, build) = facts.get("python", ""), facts.get("torch", "").partition("+")
        kind = (python.rpartition(".")[0], facts.get("machine", ""), build) if field == "environment" else ()
        value = version if field == "torch" else facts.get(field, "missing")
        kinds.setdefault(kind, {})[host] = value or "missing"
    return list(kinds.values())
