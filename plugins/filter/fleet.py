"""Filters over the inventory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    becoming,
    fleet_id,
    project_folder,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "fleet_id": fleet_id.fleet_id,
            "project_folder": project_folder.project_folder,
            "becomes_root": becoming.becomes_root,
        }
