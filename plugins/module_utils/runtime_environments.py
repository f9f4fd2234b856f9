"""Filters over all hosts of a play: the kinds there are, and whose environment is not like the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

PROJECT = "nanofleet"


def runtime_kind(probe: Mapping[str, str]) -> str:
    """The name of a kind: what a wheel depends on, as in 3.11-x86_64, 3.11-x86_64-cuda, 3.12-x86_64-cu128."""
    name = f"{probe['python']}-{probe['machine']}"
    if probe["torch"] == "cpu":
        return name
    # Of the path alone: before it there may be a password.
    return f"{name}-{urlsplit(probe['index']).path.rstrip('/').split('/')[-1] or probe['torch']}"


def probe(hostvars: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What the host said of itself, and the build of torch that it is to have."""
    return {**hostvars[host]["__runtime_probe"]["host"], **hostvars[host]["__runtime_build"]}


def runtime_kinds(hosts: list[str], hostvars: Mapping[str, Any]) -> list[dict[str, str]]:
    """The kinds among the hosts, each once: its name, and what makes it but for the index (runtime_index)."""
    kinds = {}
    for host in hosts:
        seen = probe(hostvars, host)
        name = runtime_kind(seen)
        kinds[name] = {"name": name, **{key: seen[key] for key in ("python", "machine", "torch")}}
    return [kinds[name] for name in sorted(kinds)]


def runtime_index(kind: str, hosts: list[str], hostvars: Mapping[str, Any]) -> str:
    """The index of a kind, which may hold a password: so it stands in no loop's item, which is shown."""
    each = (probe(hostvars, host) for host in hosts)
    return next(str(seen["index"]) for seen in each if runtime_kind(seen) == kind)


def environment(hostvars: Mapping[str, Any], host: str) -> Mapping[str, Any]:
    """What the host's module said last: after installing, or when it was asked and had nothing to do."""
    asked = hostvars[host]["__runtime_asked"]
    return asked if asked["ready"] else hostvars[host].get("__runtime_installed", asked)


def installed(hosts: list[str], hostvars: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The environments there are, by host; none in a dry run before the first setup."""
    found = {host: environment(hostvars, host) for host in hosts}
    return {host: each for host, each in found.items() if each.get("installed")}


def runtime_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose installed files or versions differ from those of most others."""
    found = []
    environments = installed(hosts, hostvars)
    by_kind: dict[str, dict[str, str]] = {}
    for host, each in environments.items():
        by_kind.setdefault(runtime_kind(probe(hostvars, host)), {})[host] = each["installed"]
    for kind, digests in by_kind.items():
        usual = most(digests.values())
        found += [
            f"{host}: its environment is not that of the other {kind} hosts "
            f"({digest[:12]} instead of {usual[:12]}): remove its folder under venvs and run setup.yml again."
            for host, digest in digests.items()
            if digest != usual
        ]
    versions = {host: each["versions"] for host, each in environments.items()}
    for name in sorted({name for each in versions.values() for name in each} - {PROJECT}):
        # A kind may need a package that another does not; whoever has it has the same, whatever the build.
        have = {host: each[name].split("+")[0] for host, each in versions.items() if name in each}
        usual = most(have.values())
        found += [
            f"{host} has {name} {version}, the others {usual}: run setup.yml for all hosts at once."
            for host, version in have.items()
            if version != usual
        ]
    trainers = {host: each["project"] for host, each in environments.items() if each.get("project")}
    found += [
        f"{host} has the trainer {digest[:12]}, the others {most(trainers.values())[:12]}: "
        "run setup.yml for all hosts at once."
        for host, digest in trainers.items()
        if digest != most(trainers.values())
    ]
    return found


def runtime_summary(hosts: list[str], hostvars: Mapping[str, Any]) -> str:
    """What is the same on all hosts, and the digest of each kind."""
    environments = installed(hosts, hostvars)
    if not environments:
        return "No environment is installed yet."
    first = next(iter(environments.values()))
    torch = {each["versions"].get("torch", "").split("+")[0] for each in environments.values()} - {""}
    same = [f"torch {version}" for version in sorted(torch)]
    same += [f"the trainer {first['project'][:12]}"] if first.get("project") else []
    same += [f"{len(first['versions'])} packages"]
    by_kind: dict[str, list[str]] = {}
    for host, each in environments.items():
        by_kind.setdefault(f"{runtime_kind(probe(hostvars, host))} {each['installed'][:12]}", []).append(host)
    kinds = "; ".join(f"{kind} on {', '.join(where)}" for kind, where in by_kind.items())
    return f"The same on all hosts: {', '.join(same)}. Installed files by kind: {kinds}."


def most(values: Any) -> str:
    return str(Counter(values).most_common(1)[0][0])
