"""Action plugin: make the doctor's report, and keep it if nothing prevents training."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import (
    fleet_state,
    kept_file,
    measured,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_report import examined, text
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed


class ActionModule(ControllerAction):
    """The action `doctor_report`: makes the report from what the role doctor has registered on the hosts."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hosts, hostvars, now = asked["hosts"], variables["hostvars"], time.time()
        about = {"time": round(now, 1), "seconds": now - float(asked["begun"]), "quick": asked["quick"]}
        found = measured(hosts, hostvars)
        report = examined(found, hostvars, asked["limits"], {**about, "forks": variables["ansible_forks"]})
        if asked["file"]:
            Path(asked["file"]).parent.mkdir(parents=True, exist_ok=True)
            Path(asked["file"]).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if not self._task.check_mode:
            kept = kept_file(asked["kept"], hosts)
            if report["good"]:
                kept.parent.mkdir(parents=True, exist_ok=True)
                state = fleet_state(found, asked["limits"], hostvars)
                text_of_both = json.dumps({"state": state, "report": report}, indent=2)
                kept.write_text(text_of_both + "\n", encoding="utf-8")
            else:
                kept.unlink(missing_ok=True)
        message = as_typed(text(report), asked["source"])
        return {"good": report["good"], "message": message}
