"""Messages of the action run_plan about hosts that are not set up, or not set up alike."""

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

    installed: host -> result of installed_environment. digest: of the trainer in this checkout. Environments
    are compared only between hosts with the same Python, machine and build of torch, because each of these
    has its own. A build is not a version: 2.13.0+cpu trains with 2.13.0+cu130.
    """
    differences = []
    for field in dict.fromkeys(name for facts in installed.values() for name in facts):
        kinds: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for host, facts in installed.items():
            kind = _kind(facts) if field == "environment" else ()
            value = facts.get(field, "missing")
            value = value.split("+")[0] if field == "torch" else value
            kinds.setdefault(kind, {}).setdefault(value, []).append(host)
        for values in kinds.values() if field != "machine" else ():
            if len(values) > 1:
                shown = "; ".join(f"{value[:12]} on {', '.join(where)}" for value, where in values.items())
                differences.append(f"{field} is {shown}")
    if differences:
        differing = ", and ".join(differences)
        return (
            f"The hosts differ in what is installed: {differing}. Make them equal: ansible-playbook setup.yml"
        )
    if any(facts.get("trainer") != digest for facts in installed.values()):
        return "The hosts hold another trainer than this folder. Bring it to them: ansible-playbook setup.yml"
    return ""


def _kind(facts: Mapping[str, str]) -> tuple[str, ...]:
    """(Python such as 3.11, machine, build of torch), on which the content of an environment depends."""
    python, torch = facts.get("python", ""), facts.get("torch", "")
    return python.rpartition(".")[0], facts.get("machine", ""), torch.partition("+")[2]
