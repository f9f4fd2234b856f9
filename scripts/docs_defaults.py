"""Updates the defaults in the files that repeat them: argument_specs.yml of each role, the sample inventory.

A default is defined in one place: in a field of RunConfig, in defaults/main.yml of a role, or in
vars/declared_settings.yml of the role preflight. scripts/docs_reference.py writes the updated files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import (
    SETTINGS_FILE,
    setting_defaults,
)

from scripts.generated import ROOT
from trainer.config import AUTO_IS_0, RunConfig

OPTION = re.compile(r"( +)(\w+):(?: &\w+)?")
DEFAULT = re.compile(r"( +)(default: )(.+)")
SAME = re.compile(r"\{\{ lookup\('nanofleet\.fleet\.setting', '(\w+)'\)(?: \| int)? \}\}")
SAMPLE_LINE = re.compile(r"# (\w+): (\S.*?)( +#.*)?")


def spec_defaults() -> dict[str, Any]:
    """{setting: its default}.

    The default of a role's variable can be a lookup of another setting; it is replaced by the default of that
    setting.
    """
    defaults = setting_defaults()
    found = {name: SAME.fullmatch(value) for name, value in defaults.items() if isinstance(value, str)}
    return defaults | {name: defaults[setting[1]] for name, setting in found.items() if setting}


def is_repeated(value: Any) -> bool:
    """Whether other files repeat the default `value`: a number, true, false, or a text without Jinja.

    Computed texts and empty texts are not repeated.
    """
    return isinstance(value, bool | int | float) or (
        isinstance(value, str) and "{{" not in value and value != ""
    )


def as_yaml(value: Any) -> str:
    """A default as YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).splitlines()[0]


def specs_with_defaults(text: str, defaults: Mapping[str, Any]) -> str:
    """The content `text` of an argument_specs.yml, with the current value in each line `default: VALUE`.

    defaults: {option: its current default}.
    """
    lines, name, margin = [], "", 0
    for line in text.splitlines():
        if (found := OPTION.fullmatch(line)) and found[2] in defaults:
            name, margin = found[2], len(found[1])
        elif (found := DEFAULT.fullmatch(line)) and len(found[1]) == margin + 2:
            value = defaults.get(name)
            if is_repeated(value) and yaml.safe_load(found[3]) != value:
                line = found[1] + found[2] + as_yaml(value)
        lines.append(line)
    return "\n".join(lines) + "\n"


def sample_with_defaults(text: str, defaults: Mapping[str, Any]) -> str:
    """The content `text` of the sample inventory, with the current default in each line `# NAME: VALUE`.

    defaults: {name: its current default}.
    """
    lines = []
    for line in text.splitlines():
        found = SAMPLE_LINE.fullmatch(line)
        value = defaults.get(found[1]) if found else None
        if found and is_repeated(value) and yaml.safe_load(found[2]) != value:
            shown = "auto" if found[1] in AUTO_IS_0 and value == 0 else as_yaml(value)
            comment = (found[3] or "").lstrip()
            column = len(line) - len(comment)
            line = (
                f"# {found[1]}: {shown} ".ljust(column).rstrip(" ")
                if not comment
                else (f"# {found[1]}: {shown} ".ljust(column) + comment)
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """{path: text} of each file that repeats defaults, with the current defaults in the text."""
    defaults = {**setting_defaults(), **RunConfig().to_dict()}
    specs = {
        path: specs_with_defaults(path.read_text(encoding="utf-8"), spec_defaults())
        for path in ROOT.glob("roles/*/meta/argument_specs.yml")
    }
    sample = ROOT / SETTINGS_FILE
    return specs | {sample: sample_with_defaults(sample.read_text(encoding="utf-8"), defaults)}
