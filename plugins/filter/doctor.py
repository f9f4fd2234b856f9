"""Filters of the role doctor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_measured, doctor_report


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "doctor_rounds": doctor_measured.rounds,
            "doctor_peers": doctor_measured.peers,
            "doctor_calls": doctor_measured.calls,
            "doctor_blocked_hosts": doctor_measured.turned_away,
            "doctor_rehearsal": doctor_measured.part,
            "doctor_measured": doctor_measured.measured,
            "doctor_fleet_state": doctor_measured.fleet_state,
            "doctor_fleet_name": doctor_measured.fleet_name,
            "doctor_due": doctor_measured.due,
            "doctor_report": doctor_report.examined,
            "doctor_text": doctor_report.text,
        }
