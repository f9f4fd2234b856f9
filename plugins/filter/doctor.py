"""Filters of the role doctor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    doctor_hosts,
    doctor_links,
    doctor_measured,
    doctor_paths,
    doctor_report,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "doctor_rounds": doctor_measured.rounds,
            "doctor_peers": doctor_measured.peers,
            "doctor_calls": doctor_measured.calls,
            "doctor_blocked_hosts": doctor_measured.turned_away,
            "doctor_can_rehearse": doctor_measured.can_rehearse,
            "doctor_rehearsal": doctor_measured.part,
            "doctor_measured": doctor_measured.measured,
            "doctor_fleet_state": doctor_measured.fleet_state,
            "doctor_fleet_name": doctor_measured.fleet_name,
            "doctor_due": doctor_measured.due,
            "doctor_host_findings": doctor_hosts.host_findings,
            "doctor_link_findings": doctor_links.link_findings,
            "doctor_path_findings": doctor_paths.path_findings,
            "doctor_report": doctor_report.report,
            "doctor_text": doctor_report.text,
        }
