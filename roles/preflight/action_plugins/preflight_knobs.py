"""Check the knobs a person asked for, before a host is touched.

Ansible ignores a misspelt `-e` name without a word and hands every `-e` value on as text. This plugin reads
the extra vars themselves (from `-e @file` and ansible-runner too) and returns `findings`: names nobody knows,
with the nearest known one, and values of the wrong type or range. What is known comes from where it is
defined: the trainer's RunConfig, vars/knobs.yml, the roles' argument specs and the wiring,
playbooks/group_vars/all.yml.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

ROLE = Path(__file__).resolve().parents[1]
REPOSITORY = ROLE.parents[1]
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")
# What a person types where the default would tell him nothing.
EXAMPLES = {"run_id": "evening-1", "stop_now": "true"}


def run_config() -> Any:
    """The trainer's RunConfig: it needs nothing but the standard library."""
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from trainer.config import RunConfig

    return RunConfig


def read_yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def known_names(roles: Path, wiring: Path, knobs: Path) -> dict[str, dict[str, Any]]:
    """Every name that `-e` may set, with its type, choices and range where they are written down."""
    known: dict[str, dict[str, Any]] = {}
    if wiring.exists():
        known.update({name: {} for name in read_yaml(wiring)})
    for specs in sorted(roles.glob("*/meta/argument_specs.yml")):
        for entry in read_yaml(specs).get("argument_specs", {}).values():
            known.update({name: spec or {} for name, spec in (entry.get("options") or {}).items()})
    known.update(read_yaml(knobs)["preflight_known_knobs"])
    return known


def finding(where: str, problem: str, remedy: str) -> dict[str, str]:
    return {"host": where, "problem": problem, "remedy": remedy}


def unknown_finding(name: str, value: Any, names: list[str]) -> dict[str, str]:
    """A name nobody reads: almost always a typing error."""
    if name == "_raw_params":
        word = str(value).split()[0]
        return finding(
            f"-e {word}",
            "a knob needs a value.",
            f"the same with -e {word}=VALUE  (no blanks around =; around a value that has some, "
            "quotes of its own: -e 'NAME=\"a b\"')",
        )
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), list(lower), n=1)
    if not near:
        return finding(
            f"-e {name}={value}", "no such knob.", "inventory/sample/group_vars/fleet.yml lists them all"
        )
    nearest = lower[near[0]]
    return finding(
        f"-e {name}={value}",
        f"no such knob; did you mean {nearest}?",
        f"the same with -e {nearest}={value} instead of -e {name}={value}",
    )


def value_problem(name: str, value: Any, spec: Mapping[str, Any]) -> str | None:
    """One sentence if `value` is not what `spec` (type, choices, min, max, pattern) allows."""
    text, kind = str(value).strip(), spec.get("type", "str")
    if "{{" in text:  # a template: its value is known only where it is used
        return None
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
    if pattern and text and not re.fullmatch(pattern, text):
        return f"{name} is '{text}': it takes {spec['takes']}."
    return None


def config_problems(values: Mapping[str, Any], config: Any) -> list[tuple[str, str]]:
    """(field, sentence) for each value RunConfig refuses; the sentences are RunConfig's own."""
    left, problems = dict(values), []
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
    inventory: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
    config: Any,
) -> list[dict[str, str]]:
    """All findings about `asked` (extra vars, which win) and `inventory` (a fleet host's variables)."""
    fields = config.field_names()
    names = sorted({*known, *fields})
    findings = [
        unknown_finding(name, value, names)
        for name, value in asked.items()
        if name not in names and not name.startswith("ansible_")
    ]
    values = {
        name: value for name, value in {**inventory, **asked}.items() if name in names and value is not None
    }

    def label(name: str) -> str:
        return f"-e {name}={asked[name]}" if name in asked else f"inventory {name}"

    def remedy(name: str, message: str = "") -> str:
        proposed = re.search(r"; use (\d+)", message)
        example = EXAMPLES.get(name, known.get(name, {}).get("default", getattr(config, name, "VALUE")))
        example = proposed.group(1) if proposed else example
        instead = f" instead of -e {name}={asked[name]}" if name in asked else ""
        return f"the same with -e {name}={example}{instead}"

    if "steps" in values and "num_iterations" in asked:
        message = "steps and num_iterations are the same knob; give one of them."
        typed = f"the same without -e num_iterations={asked['num_iterations']}"
        findings.append(finding(label("steps"), message, typed))
    for name, value in values.items():
        problem = None if name in fields else value_problem(name, value, known[name])
        if problem:
            findings.append(finding(label(name), problem, remedy(name)))
    of_run = {name: value for name, value in values.items() if name in fields and "{{" not in str(value)}
    for name, message in config_problems(of_run, config):
        findings.append(finding(label(name) if name in values else "-e", message, remedy(name, message)))
    return findings


class ActionModule(ActionBase):
    """`preflight_knobs: {host: NAME}` returns `findings`; it changes nothing and touches no host."""

    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset({"host"})

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        known = known_names(
            REPOSITORY / "roles", REPOSITORY / "playbooks/group_vars/all.yml", ROLE / "vars/knobs.yml"
        )
        config = run_config()
        host = self._task.args.get("host") or ""
        hostvars = (task_vars or {}).get("hostvars", {})
        inventory = {}
        if host and host in hostvars:
            wanted = {*config.field_names(), *read_yaml(ROLE / "vars/knobs.yml")["preflight_known_knobs"]}
            inventory = {name: hostvars[host][name] for name in wanted if name in hostvars[host]}
        asked = dict(load_extra_vars(self._loader))
        result.update(changed=False, findings=check(asked, inventory, known, config))
        return result
