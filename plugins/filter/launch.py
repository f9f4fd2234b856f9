"""Filters of the role launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    launch_allowed,
    launch_installed,
    launch_logs,
    launch_plan,
    launch_report,
    launch_status,
    launch_transfer,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "launch_name": launch_plan.launch_name,
            "launch_plan": launch_plan.launch_plan,
            "launch_busy": launch_plan.launch_busy,
            "launch_outcome": launch_plan.launch_outcome,
            "launch_settled": launch_plan.is_settled,
            "launch_count_cpus": launch_plan.launch_count_cpus,
            "launch_trainer_digest": launch_plan.trainer_digest,
            "launch_allowed": launch_allowed.allowed,
            "launch_transferred": launch_transfer.launch_left_to,
            "launch_transfer_plan": launch_transfer.launch_alone,
            "launch_installed": launch_installed.launch_installed,
            "launch_skew": launch_installed.launch_skew,
            "launch_fetched": launch_logs.launch_fetched,
            "launch_logs": launch_logs.launch_logs,
            "launch_since": launch_logs.launch_since,
            "launch_shows_steps": launch_logs.launch_tells_steps,
            "launch_begins": launch_report.launch_begins,
            "launch_expected": launch_report.launch_expected,
            "launch_run_shown": launch_report.launch_run_shown,
            "launch_failure": launch_report.launch_failure,
            "launch_unmet": launch_report.launch_unmet,
            "launch_idle": launch_report.launch_idle,
            "launch_started": launch_report.launch_started,
            "launch_can_save": launch_report.launch_can_save,
            "launch_several_active": launch_report.launch_several_up,
            "launch_stop_expected": launch_report.launch_stop_expected,
            "launch_stopped": launch_report.launch_stopped,
            "launch_status": launch_status.launch_status,
        }
