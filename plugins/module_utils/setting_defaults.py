"""Defaults of settings, each read from the file that declares it. Used on the controller only."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import read_yaml

COLLECTION = Path(__file__).resolve().parents[2]
SETTINGS = COLLECTION / "roles" / "preflight" / "vars" / "declared_settings.yml"


@cache
def setting_defaults() -> dict[str, Any]:
    """{name: default} of the variables of roles, and of the settings that belong to no role."""
    found: dict[str, Any] = {}
    for path in sorted(COLLECTION.glob("roles/*/defaults/main.yml")):
        found |= read_yaml(path)
    settings = read_yaml(SETTINGS)["preflight_declared_settings"]
    return found | {name: spec["default"] for name, spec in settings.items() if "default" in spec}
