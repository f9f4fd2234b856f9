"""Action plugin: check every host before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import UNCHANGED, reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import facts_of, host_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_run import run_findings, run_settings
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_use import use_findings


class ActionModule(ControllerAction):
    """The action `check_hosts`: makes findings from what the role preflight has registered on all hosts.

    It fails if a finding is a refusal. Options and result: plugins/modules/check_hosts.yml.
    """

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hostvars = variables["hostvars"]
        facts = facts_of(asked["hosts"], hostvars)
        findings = [
            *host_findings(asked["hosts"], hostvars, asked["limits"]),
            *run_findings(facts, asked["run"]),
            *use_findings(facts, asked),
        ]
        logins = {
            host: {name: each.get(name, "") for name in ("login", "connection")}
            for host, each in facts.items()
        }
        claims = {host: each.get("claim", "") for host, each in facts.items()}
        settings = run_settings(facts, asked["run"])
        # setup.yml checks whether a run fits on new hosts after it has set them up, so they were changed.
        trains = asked["run"]["asked"] and any(each.get("active") for each in facts.values())
        state = "the active run was not changed" if trains else UNCHANGED
        return {**reported(findings, state), "logins": logins, "claims": claims, "settings": settings}
