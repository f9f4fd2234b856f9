"""Filters of the role bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    bench_plan,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "bench_plan": bench_plan.bench_plan,
            "bench_measured": bench_plan.bench_measured,
            "bench_summary": bench_plan.bench_says,
            "bench_line": bench_plan.bench_line,
        }
