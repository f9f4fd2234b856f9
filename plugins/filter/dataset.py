"""Filters of the role dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    dataset_findings,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "dataset_findings": dataset_findings.dataset_findings,
            "dataset_phrases": dataset_findings.dataset_phrases,
            "dataset_rows": dataset_findings.dataset_rows,
            "dataset_rows_findings": dataset_findings.dataset_rows_findings,
        }
