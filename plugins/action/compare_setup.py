"""Action plugin: compare the states of all hosts with what setup.yml would make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.setup_comparison import Fleet, Ports, Wanted


def digests(wheelhouses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The sha256 of the lock files of all wheelhouses, as {environment: {kind of host: sha256}}.

    wheelhouses: {environment: {kind of host: result of the module wheelhouse}}. The environment is train or
    tracker. The kind is a name such as 3.11-x86_64 (see runtime_kind).
    """
    return {
        name: {kind: str(made["digest"]) for kind, made in by_kind.items()}
        for name, by_kind in wheelhouses.items()
    }


class ActionModule(ControllerAction):
    """The action `compare_setup`. It reads what the role setup_state has registered on the hosts."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        hosts, hostvars, logins = asked["hosts"], variables["hostvars"], asked["logins"]
        states = {}
        for host in hosts:
            tried = hostvars[host].get("__setup_state_tried") or {}
            states[host] = {**(hostvars[host].get("__setup_state_read") or {}), "tried": tried}
        wanted = Wanted(
            coordinator=hosts[0],
            ports=Ports(**{name: int(port) for name, port in asked["ports"].items()}),
            comment=asked["comment"],
            enable=boolean(asked["enable"]),
            torch={
                host: (hostvars[host]["setup_state_torch"], hostvars[host]["setup_state_torch_index"])
                for host in hosts
            },
            connections={host: (logins.get(host) or {}).get("connection", "") for host in hosts},
            digests=digests(asked.get("wheelhouses") or {}),
            tracker=asked.get("tracker"),
        )
        fleet = Fleet(states, wanted)
        if not fleet.read:
            return {"read": False, "same": False, "differences": fleet.differences()}
        result: dict[str, Any] = {
            "read": True,
            "network": {host: choice["address"] for host, choice in fleet.choices.items()},
            "fleet": fleet.fleet_addresses(),
            "kinds": fleet.kinds(),
            "tracker_kind": fleet.kind(hosts[0], ("cpu", "")),
            "tracker_state": states[hosts[0]]["tracker"],
            "controllers": states[hosts[0]]["controllers"],
        }
        if "wheelhouses" not in asked:
            return result
        differences = fleet.differences()
        report = [] if differences else fleet.report()
        return {**result, "same": not differences, "differences": differences, "message": report}
