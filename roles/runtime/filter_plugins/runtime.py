"""Filters over all hosts of a play: the kinds there are, and whose environment is not like the others'."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any


def probe(hostvars: Mapping[str, Any], host: str) -> dict[str, Any]:
    return dict(json.loads(hostvars[host]["__runtime_probe"]["stdout"]))


def runtime_kinds(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """The kinds (Python version and architecture) among the hosts, each once."""
    return sorted({str(probe(hostvars, host)["kind"]) for host in hosts})


def environment(hostvars: Mapping[str, Any], host: str) -> Mapping[str, Any]:
    """What the host's module said last: after installing, or when it was asked and had nothing to do."""
    asked = hostvars[host]["__runtime_asked"]
    return asked if asked["ready"] else hostvars[host].get("__runtime_installed", asked)


def runtime_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose installed files or versions differ from those of most others."""
    found = []
    by_kind: dict[str, dict[str, str]] = {}
    versions: dict[str, dict[str, str]] = {}
    for host in hosts:
        env = environment(hostvars, host)
        if env.get("installed"):
            by_kind.setdefault(str(probe(hostvars, host)["kind"]), {})[host] = env["installed"]
            versions[host] = env["versions"]
    for kind, digests in by_kind.items():
        usual = most(digests.values())
        found += [
            f"{host}: its environment is not that of the other {kind} hosts "
            f"({digest[:12]} instead of {usual[:12]}): remove its folder under venvs and run setup.yml again."
            for host, digest in digests.items()
            if digest != usual
        ]
    for name in sorted({name for each in versions.values() for name in each} - {"nanofleet"}):
        # A kind may need a package that another does not; whoever has it has the same, whatever the build.
        have = {host: each[name].split("+")[0] for host, each in versions.items() if name in each}
        usual = most(have.values())
        found += [
            f"{host} has {name} {version}, the others {usual}: run setup.yml for all hosts at once."
            for host, version in have.items()
            if version != usual
        ]
    return found


def most(values: Any) -> str:
    return str(Counter(values).most_common(1)[0][0])


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"runtime_kinds": runtime_kinds, "runtime_findings": runtime_findings}
