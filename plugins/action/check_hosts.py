"""Action plugin: check every host before anything is changed.

Options and result: plugins/modules/check_hosts.py.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import facts_of, host_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_run import run_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_use import use_findings


class ActionModule(ActionBase):
    """Reads the facts that the role preflight registered in hostvars; connects to no host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked, hostvars = self._task.args, (task_vars or {})["hostvars"]
        facts = facts_of(asked["hosts"], hostvars)
        findings = [
            *host_findings(asked["hosts"], hostvars, asked["limits"]),
            *run_findings(facts, asked["run"]),
            *use_findings(facts, asked),
        ]
        return result | reported(findings)
