"""Action plugin: decide whether the doctor checks the fleet before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import (
    due,
    fleet_state,
    kept_file,
    measured,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed


class ActionModule(ControllerAction):
    """The action `doctor_due`: compares the fleet's state with that in the last report without a fault."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hosts, hostvars = asked["hosts"], variables["hostvars"]
        kept = kept_file(asked["kept"], hosts)
        state = fleet_state(measured(hosts, hostvars), asked["limits"], hostvars)
        before = kept.read_text(encoding="utf-8") if kept.is_file() else ""
        return {"reason": as_typed(due(state, before, asked["when"]))}
