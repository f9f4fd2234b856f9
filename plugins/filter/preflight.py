"""Filters of the role preflight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    findings,
    preflight_hosts,
    preflight_inventory,
    preflight_run,
    preflight_use,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "preflight_table": findings.table,
            "preflight_refusals": findings.refusals,
            "preflight_inventory_findings": preflight_inventory.inventory_findings,
            "preflight_facts": preflight_hosts.facts_of,
            "preflight_host_findings": preflight_hosts.host_findings,
            "preflight_run_id": preflight_run.run_name,
            "preflight_run_findings": preflight_run.run_findings,
            "preflight_use_findings": preflight_use.use_findings,
        }
