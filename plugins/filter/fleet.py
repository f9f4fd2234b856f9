"""The Jinja filters of the collection. Nearly all are pure functions of module_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.utils.display import Display
from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    claim_file,
    dataset_findings,
    doctor_measured,
    lab_plan,
    network_interfaces,
    network_rules,
    project_folder,
    reset_report,
    run_leave,
    run_logs,
    run_plan,
    run_report,
    run_status,
    run_summary,
    runtime_environments,
    setup_comparison,
    systemd_unit,
    typed_commands,
    unit_settings,
)


def cache_folder(path: str) -> str:
    """The folder for files that can be made again, such as wheelhouses; warns if it is a temporary folder.

    path: the path of a playbook or role (see project_folder.cache_folder). Raises AnsibleFilterError if the
    temporary folder belongs to another user, or other users may write to it.
    """
    try:
        folder, lasts = project_folder.cache_folder(path)
    except OSError as error:
        raise AnsibleFilterError(str(error)) from None
    if not lasts:
        Display().warning(
            f"The cache is {folder}, a temporary folder, because this user cannot write to the usual one. "
            "Make the checkout writable; with an installed collection, set XDG_CACHE_HOME to a folder that "
            "lasts."
        )
    return folder


class FilterModule:
    """The filter plugin: maps each filter's name to its function."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "as_typed": typed_commands.as_typed,
            "cache_folder": cache_folder,
            "claim_refusals": claim_file.refusals,
            "cpu_list": systemd_unit.numbers,
            "dataset_findings": dataset_findings.dataset_findings,
            "dataset_phrases": dataset_findings.dataset_phrases,
            "dataset_rows": dataset_findings.dataset_rows,
            "dataset_rows_findings": dataset_findings.dataset_rows_findings,
            "doctor_blocked_hosts": doctor_measured.blocked_hosts,
            "doctor_measured": doctor_measured.measured,
            "doctor_peers": doctor_measured.peers,
            "doctor_rehearsal": doctor_measured.rehearsal_part,
            "doctor_rounds": doctor_measured.rate_rounds,
            "evaluate_failure": run_report.evaluation_failure,
            "fleet_id": project_folder.fleet_id,
            "lab_burst": lab_plan.lab_burst,
            "lab_containers": lab_plan.lab_containers,
            "lab_failures": lab_plan.lab_failures,
            "lab_free_subnet": lab_plan.lab_free_subnet,
            "lab_plan": lab_plan.lab_plan,
            "network_choose": network_interfaces.choose,
            "network_findings": network_rules.findings,
            "network_lines": network_interfaces.lines,
            "network_measured": network_rules.measured,
            "network_peer_findings": network_interfaces.peer_findings,
            "network_protection": network_rules.protection,
            "network_resolve": network_interfaces.resolve,
            "network_rules": network_rules.rules,
            "network_sources": network_rules.sources,
            "project_folder": project_folder.project_folder,
            "reset_report": reset_report.report,
            "run_begins": run_report.begins,
            "run_busy": run_plan.busy,
            "run_expected": run_report.expected,
            "run_failure": run_report.failure,
            "run_fetched": run_logs.fetched,
            "run_leave_refusal": run_leave.refusal,
            "run_left": run_leave.report,
            "run_logs": run_logs.merged_logs,
            "run_name": run_plan.run_name,
            "run_new_hosts": run_summary.new_hosts,
            "run_started": run_report.started,
            "run_status": run_status.status_screen,
            "run_stop_expected": run_report.stop_expected,
            "run_stopped": run_report.stopped,
            "run_summary": run_summary.summary,
            "run_transfer": run_plan.transfer_plan,
            "runtime_kind": runtime_environments.runtime_kind,
            "setup_peers": setup_comparison.peers,
            "systemd_env": unit_settings.systemd_env,
            "systemd_line": unit_settings.systemd_line,
            "systemd_quote": unit_settings.systemd_quote,
            "tracker_differences": setup_comparison.tracker_differences,
            "unit_addresses": unit_settings.allowed,
        }
