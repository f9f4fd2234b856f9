"""Filters of the role lab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    lab_plan,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "lab_free_subnet": lab_plan.lab_free_subnet,
            "lab_plan": lab_plan.lab_plan,
            "lab_cpus": lab_plan.lab_cpus,
            "lab_subnets": lab_plan.lab_subnets,
            "lab_containers": lab_plan.lab_containers,
            "lab_stopped": lab_plan.lab_stopped,
            "lab_failures": lab_plan.lab_failures,
            "lab_burst": lab_plan.lab_burst,
            "lab_can_raise_limits": lab_plan.lab_can_raise_limits,
            "lab_mirror_of": lab_plan.lab_mirror_of,
            "lab_file_text": lab_plan.lab_file_text,
        }
