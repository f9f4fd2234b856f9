"""The settings that a person can give: their names, defaults and checks. Used on the controller only.

Ansible ignores a misspelt `-e` name silently and passes every `-e` value as text. `check` therefore gets the
extra vars (also from `-e @file` and ansible-runner) and the inventory variables of every host, and returns
findings about unknown names and about values of the wrong type or range. Known names are the fields of
RunConfig; those in vars/declared_settings.yml of the role preflight; and the variables of roles and of
playbooks/group_vars/all.yml that inventory/sample lists.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig
from ansible_collections.nanofleet.fleet.trainer.presets import PRESETS, apply_preset

COLLECTION = Path(__file__).resolve().parents[2]
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")
RENAMED = {"bench_stages": "bench_cases", "batch_size": "device_batch_size"}
"""Name of a setting in an earlier version, or its usual name in other programs -> its present name."""
FOREIGN = ("ansible_", "awx_", "tower_")
"""Prefixes of names that Ansible itself, AWX and Ansible Automation Platform set."""
# Example values for remedies, where the default is empty or does not help.
EXAMPLES = {
    "run_id": "evening-1", "stop_now": "true", "leave": "laptop", "preset": next(iter(PRESETS)),
    "stage": "sft", "follow": "true", "every_rank": "true", "since": "10min", "checkpoint": "step_000500",
    "shares": "auto",
}  # fmt: skip
SETTINGS_FILE = "inventory/sample/group_vars/fleet.yml"
SAMPLE = (SETTINGS_FILE, "inventory/sample/hosts.yml")
Spec = Mapping[str, Any]


@cache
def _read(path: str) -> dict[str, Any]:
    """The content of a YAML file; {} if it is empty. path: relative to the folder of the collection."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((COLLECTION / path).read_text(encoding="utf-8"), loader) or {}


def _of_roles(file: str) -> list[dict[str, Any]]:
    """The content of the YAML file `file` of each role that has it, such as defaults/main.yml."""
    return [_read(str(path.relative_to(COLLECTION))) for path in sorted(COLLECTION.glob(f"roles/*/{file}"))]


def declared() -> dict[str, Spec]:
    """{name: spec} of the settings in declared_settings.yml of the role preflight, which belong to no role.

    The fields of RunConfig are not among them. spec: a dict with type, description and, if they apply,
    default, choices, min, max, pattern, takes and of_fleet (explained at the top of that file).
    """
    specs = dict(_read("roles/preflight/vars/declared_settings.yml")["preflight_declared_settings"])
    return specs | {"preset": {**specs["preset"], "choices": list(PRESETS)}}


def wired() -> set[str]:
    """The names of the variables that playbooks/group_vars/all.yml computes."""
    return {*_read("playbooks/group_vars/all.yml")}


def role_names() -> dict[str, Spec]:
    """{name: spec} of the variables of all roles, as in their argument_specs.yml.

    The names that playbooks/group_vars/all.yml computes (`wired`) have the spec {}.
    """
    entries = [
        entry for specs in _of_roles("meta/argument_specs.yml") for entry in specs["argument_specs"].values()
    ]
    options = [entry.get("options") or {} for entry in entries]
    found: dict[str, Spec] = {name: {} for name in wired()}
    return found | {name: spec for each in options for name, spec in each.items()}


def known_names() -> dict[str, Spec]:
    """{name: spec} of the settings that `-e` may set, without those of RunConfig. spec: see `declared`.

    Of the variables of roles, only those that the sample inventory lists are included. The others are
    internal: a play sets them for one role, and a value of `-e` would override that in all roles.
    """
    sample = "".join((COLLECTION / file).read_text(encoding="utf-8") for file in SAMPLE)
    listed = set(re.findall(r"^ *# (\w+):", sample, re.MULTILINE))
    return {name: spec for name, spec in role_names().items() if name in listed} | declared()


@cache
def setting_defaults() -> dict[str, Any]:
    """{name: default} of the variables of roles, and of the settings that belong to no role."""
    of_roles = {name: value for values in _of_roles("defaults/main.yml") for name, value in values.items()}
    return of_roles | {name: spec["default"] for name, spec in declared().items() if "default" in spec}


def _name_finding(name: str, value: Any, names: list[str]) -> Finding:
    """A finding about `-e` with a name that is not one of `names`."""
    given = f"-e {name}={value}"
    if name in role_names():
        problem = f"The playbooks compute the variable {name} themselves, so -e must not set it."
        fix = f"repeat the command without -e {name}; {SETTINGS_FILE} lists the settings that -e can set"
        return finding("NF001", given, problem, fix)
    if name == "_raw_params":
        word = str(value).split()[0]
        fix = (
            f"repeat the command with -e {word}=VALUE  (no spaces around =; quote a value that contains "
            "spaces: -e 'NAME=\"a b\"')"
        )
        return finding("NF002", f"-e {word}", f"-e contains {word} without =VALUE.", fix)
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(RENAMED.get(name, name).lower(), list(lower), n=1)
    if not near:
        places = f"{SETTINGS_FILE} or docs/reference/settings.md"
        fix = f"find the name of the setting in {places}, then repeat the command with that name"
        return finding("NF003", given, f"There is no setting {name}.", fix)
    nearest = lower[near[0]]
    problem = f"There is no setting {name}. Did you mean {nearest}?"
    return finding(
        "NF004", given, problem, f"repeat the command with -e {nearest}={value} instead of {given}"
    )


def value_problem(name: str, value: Any, spec: Spec) -> str | None:
    """A sentence if `value` is not possible for the setting `name`; None if it is possible.

    spec: the spec of the setting as in argument_specs.yml, with type, choices, min, max, or pattern and takes
    (a text about the values that match the pattern).
    """
    text, kind = str(value).strip(), spec.get("type", "str")
    choices = [str(choice) for choice in spec.get("choices") or []]
    if choices and text not in choices:
        return f"{name} is '{text}': it takes {' or '.join(choices)}."
    try:
        number = {"int": int, "float": float}.get(kind, lambda _: 0)(text)
    except ValueError:
        return f"{name} is '{text}': it takes {KINDS[kind]}."
    if kind == "bool" and text.lower() not in BOOLEANS:
        return f"{name} is '{text}': it takes {KINDS[kind]}."
    low, high = spec.get("min", number), spec.get("max", number)
    if not low <= number <= high:
        bounds = f"from {low} to {high}" if "max" in spec else f"of at least {low}"
        return f"{name} is {text}: it takes {KINDS[kind]} {bounds}."
    pattern = spec.get("pattern")
    if pattern and text and not re.fullmatch(pattern, str(value), re.ASCII):
        return f"{name} is {str(value)!r}: it takes {spec['takes']}."
    return None


def _config_problems(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, message of RunConfig) for each value that RunConfig refuses."""
    left, problems = dict(values), list[tuple[str, str]]()
    while True:
        try:
            RunConfig.from_strings(left)
            return problems
        except ValueError as error:
            name = str(error).split()[0]
            if name in dict(problems):  # its default conflicts with a given value too
                return problems
            problems.append((name, str(error)))
            # A default that conflicts with a given value cannot be left out.
            if left.pop(name, None) is None:
                return problems


def _of_host(variables: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a host: its inventory variables, replaced by those of a preset and then by extra vars.

    variables: inventory variables of the host. asked: extra vars.
    """
    preset = str(asked.get("preset", variables.get("preset", ""))).strip()
    return apply_preset(preset if preset in PRESETS else "", asked, variables)


def check(asked: Mapping[str, Any], inventory: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """All findings about the settings.

    asked: extra vars, which override the inventory. inventory: host -> its variables.
    """
    known, fields = known_names(), RunConfig.field_names()
    names = sorted({*known, *fields})
    findings = [
        _name_finding(name, value, names)
        for name, value in asked.items()
        if name not in names and not name.startswith(FOREIGN)
    ]
    # A template in -e has a value only on a host.
    plain = {name: value for name, value in asked.items() if "{{" not in str(value)}
    by_host = {
        host: {
            name: value
            for name, value in _of_host(variables, plain).items()
            if name in names and value is not None
        }
        for host, variables in (inventory or {"": {}}).items()
    }

    def label(name: str, hosts: list[str]) -> str:
        if name in asked:
            return f"-e {name}={asked[name]}"
        presets = {str(by_host[host].get("preset", "")).strip() for host in hosts} & PRESETS.keys()
        if any(name in PRESETS[preset].settings for preset in presets):
            return label("preset", hosts)
        if not any(name in by_host[host] for host in hosts):
            return "-e"
        return f"inventory {name}" + ("" if len(hosts) == len(by_host) else f" of {', '.join(hosts)}")

    def example(name: str, message: str) -> str:
        proposed = re.search(r"; use (\d+)", message)
        default = known.get(name, {}).get("default", getattr(RunConfig, name, "VALUE"))
        return str(proposed[1] if proposed else EXAMPLES.get(name, default))

    with_steps = [host for host, values in by_host.items() if "steps" in values]
    if "num_iterations" in asked and with_steps:
        problem = "steps and num_iterations are two names of one setting, and both have a value."
        typed = f"repeat the command with -e steps={asked['num_iterations']} instead of -e num_iterations"
        if "steps" in asked:
            typed = f"repeat the command without -e num_iterations={asked['num_iterations']}"
        findings.append(finding("NF005", label("steps", with_steps), problem, typed))
    problems: dict[tuple[str, str], list[str]] = {}
    for host, values in by_host.items():
        of_run = {name: value for name, value in values.items() if name in fields}
        others = {name: value_problem(name, values[name], known[name]) for name in values if name in known}
        for name, message in [*others.items(), *_config_problems(of_run)]:
            if message:
                problems.setdefault((name, message), []).append(host)
    for (name, message), hosts in problems.items():
        value = example(name, message)
        typed = f"repeat the command with -e {name}={value} instead of -e {name}={asked.get(name)}"
        if label(name, hosts).startswith("inventory"):
            of_host = " (or of ansible_host, if it is not set)" if name == "fleet_address" else ""
            typed = f"correct the value of {name}{of_host} in the inventory, for example {value}"
        elif name not in asked:
            typed = f"repeat the command with -e {name}={value}"
        if message.endswith("Leave one of them out."):
            typed = "repeat the command without one of the two, or delete one of them in the inventory"
        findings.append(finding("NF006", label(name, hosts), message, typed))
    for name in names:
        if name in fields or known[name].get("of_fleet"):
            findings += _differing(name, by_host)
    return findings


def _differing(name: str, by_host: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """A finding if the hosts have different values for a setting of the whole fleet."""
    values: dict[str, list[str]] = {}
    for host, variables in by_host.items():
        values.setdefault(str(variables.get(name, "not set")).strip(), []).append(host)
    if len(values) > 1:
        each = ", ".join(f"{value} on {' and '.join(hosts)}" for value, hosts in values.items())
        problem = f"{name} differs between the hosts ({each}); all hosts need the same value."
        once = (
            f"write {name}: VALUE once into group_vars/fleet.yml of the inventory, and delete every other "
            f"{name} there (hosts.yml, host_vars/, other files of group_vars/)"
        )
        yield finding("NF007", f"inventory {name}", problem, once)
