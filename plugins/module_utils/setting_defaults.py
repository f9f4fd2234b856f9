"""Defaults of settings, each read from the file that declares it. Used on the controller only."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

COLLECTION = Path(__file__).resolve().parents[2]
SETTINGS = COLLECTION / "roles" / "preflight" / "vars" / "declared_settings.yml"


@cache
def setting_defaults() -> dict[str, Any]:
    """{name: default} of the variables of roles, and of the settings that belong to no role."""
    found: dict[str, Any] = {}
    for path in sorted(COLLECTION.glob("roles/*/defaults/main.yml")):
        found |= _read(path)
    settings = _read(SETTINGS)["preflight_declared_settings"]
    return found | {name: spec["default"] for name, spec in settings.items() if "default" in spec}


def _read(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader) or {}
