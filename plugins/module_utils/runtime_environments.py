"""Messages of setup.yml, train.yml and the doctor about the Python environments of the hosts.

Hosts of one kind (Python version, machine, build of torch) install the same wheels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, unlike_most
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import may_become_root

PROJECT = "nanofleet"
SETUP = "ansible-playbook setup.yml  (for all hosts)"


def runtime_kind(host: Mapping[str, Any], torch: str, index: str) -> dict[str, str]:
    """The kind of a host, which decides on its wheels: {"name", "python", "machine", "torch"}.

    host: a dict with python (such as 3.11) and machine (such as x86_64). torch: the build of torch: cpu or
    another. index: the URL from which torch comes. The name is PYTHON-MACHINE, such as 3.11-x86_64. Another
    build than cpu adds the last part of the path of `index` (3.11-x86_64-cu130), or the value of `torch` if
    the path is empty. The name has no other part of `index`, because it may contain a password.
    """
    name = f"{host['python']}-{host['machine']}"
    if torch != "cpu":
        name += f"-{urlsplit(index).path.rstrip('/').split('/')[-1] or torch}"
    return {"name": name, "python": host["python"], "machine": host["machine"], "torch": torch}


def installed(hosts: list[str], hostvars: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """{host: last result of the module locked_venv} for the hosts that have an environment.

    hostvars: variables by host. The last result is that of the installation, or of the check if nothing was
    installed. Before the first setup.yml no host has an environment.
    """
    found = {}
    for host in hosts:
        checked = hostvars[host]["runtime_checked"]
        found[host] = checked if checked["ready"] else hostvars[host].get("__runtime_installed", checked)
    return {host: each for host, each in found.items() if each.get("installed")}


def runtime_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> Iterator[Finding]:
    """Refusals for hosts whose installed files, package versions or trainer differ from those of most hosts.

    hosts: names. hostvars: variables by host, with the registered results of locked_venv.
    """
    environments = installed(hosts, hostvars)
    by_kind: dict[str, dict[str, str]] = {}
    for host, each in environments.items():
        by_kind.setdefault(hostvars[host]["runtime_kind"]["name"], {})[host] = each["installed"]
    for kind, digests in by_kind.items():
        for host, digest, usual in unlike_most(digests):
            problem = (
                f"The installed packages of this host (digest {digest[:12]}) differ from those of the other "
                f"hosts of the kind {kind} (digest {usual[:12]}). Hosts with the same Python, processor and "
                "build of torch need the same packages."
            )
            prefix = hostvars[host].get("nanofleet_prefix", "/opt/nanofleet")
            remove = "sudo rm" if may_become_root(hostvars[host]) else "rm"
            typed = f"{remove} -r $(readlink -f {prefix}/venv)  (on {host}), then: ansible-playbook setup.yml"
            yield finding("NF301", host, problem, typed)
    versions = {host: each["versions"] for host, each in environments.items()}
    for package in sorted({name for each in versions.values() for name in each} - {PROJECT}):
        # Not every kind of host needs every package. All hosts that have it need one version, in any build.
        have = {host: each[package].split("+")[0] for host, each in versions.items() if package in each}
        for host, version, usual in unlike_most(have):
            yield finding(
                "NF302",
                host,
                f"This host has {package} {version}, and other hosts have {usual}. All need the same "
                "version. With runtime_torch: cuda, the wheel of torch from runtime_torch_index determines "
                "the versions of the CUDA packages.",
                "in the inventory, give all hosts that have runtime_torch: cuda the same "
                f"runtime_torch_index, then: {SETUP}",
            )
    trainers = {host: each["project"] for host, each in environments.items() if each.get("project")}
    for host, digest, usual in unlike_most(trainers):
        problem = (
            f"The training program on this host (digest {digest[:12]}) differs from that on other hosts "
            f"(digest {usual[:12]}). All hosts need the same one."
        )
        yield finding("NF303", host, problem, SETUP)


def runtime_summary(hosts: list[str], hostvars: Mapping[str, Any]) -> str:
    """What all hosts have in common, and the digest of the installed files of each kind of host, as text.

    hosts: names. hostvars: variables by host, with the registered results of locked_venv.
    """
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
        kind = hostvars[host]["runtime_kind"]["name"]
        by_kind.setdefault(f"{kind} {each['installed'][:12]}", []).append(host)
    kinds = "; ".join(f"{kind} on {', '.join(where)}" for kind, where in by_kind.items())
    return f"The same on all hosts: {', '.join(same)}. Installed files by kind: {kinds}."


# -- what train.yml needs -----------------------------------------------------------------------------------


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
    """A message if what is installed differs between the hosts, or from this checkout; "" if it does not.

    installed: {host: {"torch", "trainer", "environment", ...}} as installed_environment read it. digest: the
    digest of the folder trainer/ in this checkout.
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
            "The training program on the hosts differs from the folder trainer/ on the controller. Update "
            "the hosts: ansible-playbook setup.yml"
        )
    return ""


def by_kind(installed: Mapping[str, Mapping[str, str]], field: str) -> list[dict[str, str]]:
    """The values of one field as [{host: value}]: a dict for each group of hosts that must have equal values.

    installed: as for `skew`, {host: values}. field: a key of the values, such as torch or environment; a host
    that lacks it gets "missing". For environment, hosts with the same Python (such as 3.11), machine and
    build of torch are a group; for any other field all hosts are one group. The build is no part of torch's
    version here: 2.13.0+cpu trains with 2.13.0+cu130.
    """
    kinds: dict[tuple[str, ...], dict[str, str]] = {}
    for host, facts in installed.items():
        python, (version, _plus, build) = facts.get("python", ""), facts.get("torch", "").partition("+")
        kind = (python.rpartition(".")[0], facts.get("machine", ""), build) if field == "environment" else ()
        value = version if field == "torch" else facts.get(field, "missing")
        kinds.setdefault(kind, {})[host] = value or "missing"
    return list(kinds.values())
