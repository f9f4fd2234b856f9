# SPDX-License-Identifier: MIT
"""Which hosts may leave an elastic run that continues on the others, and the report afterwards.

Pure functions of results of the module run_state, by host in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansible_collections.nanofleet.fleet.plugins.module_utils.run_plan import has_failover
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import (
    State,
    answered,
    coordinator,
    is_elastic,
    is_over,
    resume_command,
)


def refusal(states: Mapping[str, State], run_id: str, leaving: Sequence[str]) -> str:
    """Why some hosts cannot leave an elastic run, with the remedy; "" if they can.

    states: {host: result of run_state}. run_id: name of the run. leaving: names of the hosts.
    """
    if unknown := [host for host in leaving if host not in states]:
        return (
            f"Not in the inventory: {', '.join(unknown)}. The hosts of the inventory are "
            f"{', '.join(states)}. Fix: repeat the command with one of these as HOST: -e leave=HOST"
        )
    reached = answered(states)
    active = [host for host, state in reached.items() if state["run_id"] == run_id and not is_over(state)]
    if not active:
        named = f"The run {run_id} is not active" if run_id else "No run is active"
        return f"{named}, so no host can leave. Fix: see which run is active: ansible-playbook status.yml"
    run_file = reached[active[0]]["run_file"] or {}
    if not is_elastic(run_file):
        return (
            f"No host can leave the run {run_id}, because it is not elastic: it ends on all hosts when it "
            f"ends on one. Fix: to end it on all hosts: ansible-playbook stop.yml -e run_id={run_id}"
        )
    first = coordinator(states)
    if first in leaving and not has_failover(run_file):
        return (
            f"{first} is the coordinator, and the run {run_id} does not continue without it. Fix: to end the "
            f"run on all hosts: ansible-playbook stop.yml -e run_id={run_id}"
        )
    if silent := [host for host in leaving if host not in reached]:
        return (
            f"No answer from {', '.join(silent)}, so no host was stopped. The run continues without a host "
            "that is off. Fix: on a host that is on, correct SSH or sudo (see the error above), then repeat "
            "the command"
        )
    if absent := [host for host in leaving if host not in active]:
        return (
            f"{', '.join(absent)} does not take part in the run {run_id}. Those that do: "
            f"{', '.join(active)}. Fix: repeat the command with one of these as HOST: -e leave=HOST"
        )
    return ""


def report(states: Mapping[str, State], run_id: str, leaving: Sequence[str]) -> str:
    """The report after hosts have left an elastic run.

    states: {host: result of run_state} before they left. run_id: name of the run. leaving: names of the
    hosts.
    """
    rest = [host for host, state in answered(states).items() if host not in leaving and not is_over(state)]
    return (
        f"{', '.join(leaving)} left the run {run_id}, which continues on {', '.join(rest)}.\n"
        f"Take part again: {resume_command(run_id, states)}"
    )
