"""Action plugin: make the doctor's report, and keep it if nothing prevents training.

Options and result: plugins/modules/doctor_report.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import (
    fleet_state,
    kept_file,
    measured,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_report import examined, text
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed


class ActionModule(ActionBase):
    """Makes findings from what the role doctor registered in hostvars; connects to no host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked, variables = self._task.args, task_vars or {}
        hosts, hostvars, now = asked["hosts"], variables["hostvars"], time.time()
        about = {"time": round(now, 1), "seconds": now - float(asked["begun"]), "quick": asked["quick"]}
        found = measured(hosts, hostvars)
        report = examined(found, hostvars, asked["limits"], {**about, "forks": variables["ansible_forks"]})
        if asked["file"]:
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
        return {**result, "changed": False, "good": report["good"], "message": message}
