"""Action plugin: compare the environments that are installed on all hosts.

Options and result: plugins/modules/compare_environments.py.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import (
    runtime_findings,
    runtime_summary,
)


class ActionModule(ActionBase):
    """Reads the results that the role runtime registered in hostvars; connects to no host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        hosts, hostvars = self._task.args["hosts"], (task_vars or {})["hostvars"]
        summary = runtime_summary(hosts, hostvars)
        findings = list(runtime_findings(hosts, hostvars))
        return {**result, "summary": summary, **reported(findings, "the environments are not the same")}
