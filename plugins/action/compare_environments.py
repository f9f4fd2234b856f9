"""Action plugin: compare the environments that are installed on all hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import (
    runtime_findings,
    runtime_summary,
)


class ActionModule(ControllerAction):
    """The action `compare_environments`. It reads what the role runtime has registered on the hosts."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hosts, hostvars = asked["hosts"], variables["hostvars"]
        summary = runtime_summary(hosts, hostvars)
        findings = list(runtime_findings(hosts, hostvars))
        return {"summary": summary, **reported(findings, "the environments are not the same")}
