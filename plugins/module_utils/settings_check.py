"""Checks the settings that a person gave, before any host is changed.

Ansible ignores a misspelt `-e` name silently and passes every `-e` value as text. The checks get the extra
vars (also from `-e @file` and ansible-runner) and the inventory variables of every host. They return findings
about unknown names, with the most similar known name, and about values of the wrong type or range. Known are:
the fields of RunConfig; the names in vars/declared_settings.yml; the names in vars/settings.yml, which the
argument specs of roles and playbooks/group_vars/all.yml declare.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
FOREIGN = ("ansible_", "awx_", "tower_")
"""Prefixes of names that Ansible itself, AWX and Ansible Automation Platform set."""
# Example values for remedies, where the default is empty or does not help.
EXAMPLES = {"run_id": "evening-1", "stop_now": "true"}


def read_yaml(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader) or {}


def role_names(roles: Path, wiring: Path) -> dict[str, dict[str, Any]]:
    """{name: spec} of all variables of the roles and of `wiring`, the file playbooks/group_vars/all.yml.

    The spec is that of argument_specs.yml (type, choices and so on), or {}.
    """
    found: dict[str, dict[str, Any]] = {}
    if wiring.exists():
        found.update({name: {} for name in read_yaml(wiring)})
    for specs in sorted(roles.glob("*/meta/argument_specs.yml")):
        for entry in read_yaml(specs).get("argument_specs", {}).values():
            found.update({name: spec or {} for name, spec in (entry.get("options") or {}).items()})
    return found


def known_names(roles: Path, wiring: Path, declared: Path) -> dict[str, dict[str, Any]]:
    """{name: spec} of the settings that `-e` may set: in vars/settings.yml and vars/declared_settings.yml.

    Other variables are internal: a play sets them for one role. With `-e` such a value would have the highest
    precedence and hold for all roles.
    """
    found = role_names(roles, wiring)
    known = {
        name: found[name] for name in read_yaml(declared.with_name("settings.yml"))["preflight_settings"]
    }
    return known | read_yaml(declared)["preflight_declared_settings"]


def internal_finding(name: str, value: Any) -> Finding:
    """A finding about `-e` with a variable that only the playbooks set."""
    problem = "no setting but a variable that the playbooks set themselves."
    remedy = f"the same without -e {name}; inventory/sample/group_vars/fleet.yml lists the settings"
    return finding("NF001", f"-e {name}={value}", problem, remedy)


def unknown_finding(name: str, value: Any, names: list[str]) -> Finding:
    """A finding about `-e` with an unknown name, with the most similar name of `names`."""
    if name == "_raw_params":
        word = str(value).split()[0]
        return finding(
            "NF002",
            f"-e {word}",
            "a setting needs a value.",
            f"the same command with -e {word}=VALUE  (no spaces around =; quote a value that contains "
            "spaces: -e 'NAME=\"a b\"')",
        )
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), list(lower), n=1)
    if not near:
        return finding(
            "NF003",
            f"-e {name}={value}",
            "no such setting.",
            "inventory/sample/group_vars/fleet.yml lists them all",
        )
    nearest = lower[near[0]]
    return finding(
        "NF004",
        f"-e {name}={value}",
        f"no such setting; did you mean {nearest}?",
        f"the same with -e {nearest}={value} instead of -e {name}={value}",
    )


def value_problem(name: str, value: Any, spec: Mapping[str, Any]) -> str | None:
    """A sentence if `value` violates `spec` (type, choices, min, max, pattern); else None."""
    text, kind = str(value).strip(), spec.get("type", "str")
    choices = [str(choice) for choice in spec.get("choices") or []]
    if choices and text not in choices:
        return f"{name} is '{text}': it takes {' or '.join(choices)}."
    if kind == "bool" and text.lower() not in TRUTHS:
        return f"{name} is '{text}': it takes {KINDS[kind]}."
    if kind in ("int", "float"):
        try:
            number = float(text) if kind == "float" else int(text)
        except ValueError:
            return f"{name} is '{text}': it takes {KINDS[kind]}."
        low, high = spec.get("min"), spec.get("max")
        if (low is not None and number < low) or (high is not None and number > high):
            bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
            return f"{name} is {text}: it takes {KINDS[kind]} {bounds}."
    pattern = spec.get("pattern")
    if pattern and text and not re.fullmatch(pattern, str(value), re.ASCII):
        return f"{name} is {str(value)!r}: it takes {spec['takes']}."
    return None


def config_problems(values: Mapping[str, Any], config: Any) -> list[tuple[str, str]]:
    """(field, message of RunConfig) for each value that RunConfig refuses. config: that class."""
    left, problems = dict(values), list[tuple[str, str]]()
    while True:
        try:
            config.from_strings(left)
            return problems
        except ValueError as error:
            name = str(error).split()[0]
            problems.append((name, str(error)))
            if (
                left.pop(name, None) is None
            ):  # a default clashes with what was asked: nothing left to leave out
                return problems


def check(
    asked: Mapping[str, Any],
    inventory: Mapping[str, Mapping[str, Any]],
    known: Mapping[str, Mapping[str, Any]],
    config: Any,
    internal: Collection[str] = (),
) -> list[Finding]:
    """All findings about the settings.

    asked: extra vars, which override the inventory. inventory: host -> its variables. known: name -> spec.
    config: the class RunConfig. internal: names that only the playbooks set.
    """
    fields = config.field_names()
    names = sorted({*known, *fields})
    findings = [
        internal_finding(name, value) if name in internal else unknown_finding(name, value, names)
        for name, value in asked.items()
        if name not in names and not name.startswith(FOREIGN)
    ]
    # A template in -e has a value only on a host.
    plain = {name: value for name, value in asked.items() if "{{" not in str(value)}
    by_host = {
        host: {
            name: value
            for name, value in {**variables, **plain}.items()
            if name in names and value is not None
        }
        for host, variables in (inventory or {"": {}}).items()
    }

    def label(name: str, hosts: list[str]) -> str:
        if name in asked:
            return f"-e {name}={asked[name]}"
        return f"inventory {name}" + ("" if len(hosts) == len(by_host) else f" of {', '.join(hosts)}")

    def remedy(name: str, message: str = "") -> str:
        proposed = re.search(r"; use (\d+)", message)
        example = EXAMPLES.get(name, known.get(name, {}).get("default", getattr(config, name, "VALUE")))
        example = proposed.group(1) if proposed else example
        instead = f" instead of -e {name}={asked[name]}" if name in asked else ""
        return f"the same with -e {name}={example}{instead}"

    if "num_iterations" in asked and any("steps" in values for values in by_host.values()):
        message = "steps and num_iterations are the same setting; give one of them."
        hosts = [host for host, values in by_host.items() if "steps" in values]
        typed = f"the same without -e num_iterations={asked['num_iterations']}"
        findings.append(finding("NF005", label("steps", hosts), message, typed))
    problems: dict[tuple[str, str], list[str]] = {}
    for host, values in by_host.items():
        for name, value in values.items():
            problem = None if name in fields else value_problem(name, value, known[name])
            if problem:
                problems.setdefault((name, problem), []).append(host)
    for host, values in by_host.items():
        of_run = {name: value for name, value in values.items() if name in fields}
        for name, message in config_problems(of_run, config):
            problems.setdefault((name, message), []).append(host)
    for (name, message), hosts in problems.items():
        given = any(name in by_host[host] for host in hosts)
        findings.append(
            finding("NF006", label(name, hosts) if given else "-e", message, remedy(name, message))
        )
    of_fleet = [name for name in names if name in fields or known[name].get("of_fleet")]
    return findings + uneven_findings(by_host, of_fleet)


def uneven_findings(by_host: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> list[Finding]:
    """Findings about settings of the whole fleet (`names`) whose values differ between the hosts."""
    findings = []
    for name in names:
        values: dict[str, list[str]] = {}
        for host, variables in by_host.items():
            values.setdefault(str(variables.get(name, "not set")).strip(), []).append(host)
        if len(values) > 1:
            each = ", ".join(f"{value} on {' and '.join(hosts)}" for value, hosts in values.items())
            problem = f"{name} differs between the hosts ({each}); all of them need the same value."
            remedy = f"set {name} once, in group_vars/fleet.yml of the inventory"
            findings.append(finding("NF007", f"inventory {name}", problem, remedy))
    return findings
