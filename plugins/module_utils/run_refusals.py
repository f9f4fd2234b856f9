"""The reasons why train.yml refuses a run, each with what to type. Pure functions of the hosts' states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import holder
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import run_of_unit
from ansible_collections.nanofleet.fleet.trainer import config as trainer

State = Mapping[str, Any]
Ends = dict[str, list[str]]


class RefusedError(Exception):
    """The run must not start. The text of the error is the message for the person."""


def refuse_another_identity(run_file: Any, before: Any) -> None:
    """Raise RefusedError if a setting that defines the result of the run has changed."""
    differing = run_file.config.differences(before, trainer.IDENTITY)
    if differing:
        names = " and ".join(change.split()[0] for change in differing)
        raise RefusedError(
            f"The run {run_file.run_id} exists with another configuration: {'; '.join(differing)}. To resume "
            f"it, leave {names} out; for a new run choose another name: -e run_id=NAME."
        )


def refuse_shorter(run_file: Any, steps_before: int) -> None:
    """Raise RefusedError if the run would become shorter: its learning rates follow the longer length."""
    steps = run_file.config.num_iterations
    if 0 < steps < steps_before:
        raise RefusedError(
            f"The run {run_file.run_id} is one of {steps_before} steps, and {steps} are requested: a run can "
            "become longer, not shorter. To resume it, leave steps out; for a new run choose another name: "
            "-e run_id=NAME."
        )


def refuse_other_holders(own: Mapping[str, State], unit: str, ends: Ends) -> None:
    """Raise RefusedError if another run is active on a host, or if the rendezvous store's port is held.

    own: state by host, the coordinator first. unit: of the run. ends: units that are ended first, by host.
    """
    for host, state in own.items():
        for other in state.get("active_units", []):
            if other in ends.get(host, []):
                continue
            other_id = run_of_unit(other)
            raise RefusedError(
                f"{host} is busy with another run, {other_id} (unit {other}). "
                f"See it: ansible-playbook status.yml. End it: ansible-playbook stop.yml -e run_id={other_id}"
            )
    # Only the coordinator opens the store's port.
    first = next(iter(own))
    for held in own[first].get("listeners", []):
        if held.get("unit") in (unit, *ends.get(first, [])):
            continue
        who, end = holder(held, held["port"])
        raise RefusedError(
            f"Port {held['port']} on {first} is held by {who}: the run's rendezvous store needs it. "
            f"End that process on {first} ({end}), or use another port: -e store_port=PORT"
        )


def busy(state: State, host: str, run_id: str) -> str:
    """Why a host cannot take the run, as a message; "" if it can.

    Another run is active there, or a process holds the rendezvous store's port.
    """
    unit = f"nanofleet-{run_id}.service"
    try:
        refuse_other_holders({host: state}, unit, {host: [unit]})
    except RefusedError as error:
        return str(error)
    return ""


def refuse_lost_checkpoint(run_id: str, own: Mapping[str, State]) -> None:
    """Raise RefusedError if only a host other than the coordinator has checkpoints of the run."""
    first = next(iter(own))
    if own[first].get("checkpoint"):
        return
    for host, state in own.items():
        if state.get("checkpoint") and state.get("run_id") == run_id:
            raise RefusedError(
                f"The run {run_id} has its checkpoints on {host}, its former coordinator; {first} has none."
                f" Make {host} the coordinator again, or copy {state['run_dir']}/checkpoints to {first}."
            )
