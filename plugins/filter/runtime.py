"""Filters of the role runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    runtime_environments,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "runtime_kind": runtime_environments.runtime_kind,
            "runtime_kinds": runtime_environments.runtime_kinds,
            "runtime_index": runtime_environments.runtime_index,
            "runtime_findings": runtime_environments.runtime_findings,
            "runtime_summary": runtime_environments.runtime_summary,
        }
