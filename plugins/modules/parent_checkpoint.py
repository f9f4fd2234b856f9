#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the checkpoints that a fine-tuning may begin with, and recent runs of stage sft.

All files are read as the service user, because the run reads the checkpoint as this user, too.
"""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_dir import (
    RUN_ID,
    checkpoint_names,
    known_runs,
    newest_checkpoint,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as

META = ("run_id", "step", "schema", "config", "sha256", "hashes")


def checkpoints(run_dir: str) -> list[dict[str, Any]]:
    """The complete checkpoints of a run, the oldest first."""
    folder = os.path.join(run_dir, "checkpoints")
    paths = [os.path.join(folder, name) for name in checkpoint_names(folder)]
    return [found for path in paths if (found := checkpoint(path))]


def checkpoint(path: str) -> dict[str, Any] | None:
    """The checkpoint in the folder `path`, as {"path", "meta"}; None if it is not complete.

    meta: the entries META of meta.json. A checkpoint is complete if it has meta.json, which is written last.
    """
    meta = load_json(os.path.join(path, "meta.json"))
    return {"path": path, "meta": {name: meta.get(name) for name in META}} if meta else None


def read(params: dict[str, Any]) -> dict[str, Any]:
    """Read the checkpoints of a base run, and the newest runs. Returns the result of the module.

    params: options of the module. Keys of the result:
    state_dir: the option of this name.
    run: the name of the base run; "" if params["checkpoint"] is an absolute path.
    known: whether the run or checkpoint exists. runs: the names of the newest runs, at most 20.
    tuned: those of the newest runs that are of stage sft, as dicts of known_runs with has_checkpoint (whether
    the run has saved one).
    checkpoints: those of the base run, or the one at the path (see `checkpoint`), the oldest first.
    """
    runs_dir = os.path.join(params["state_dir"], "runs")
    asked = params["checkpoint"]
    run = params["run"] or ("" if os.path.isabs(asked) else asked.split("/")[0])
    found = checkpoints(os.path.join(runs_dir, run)) if RUN_ID.fullmatch(run) else []
    if os.path.isabs(asked):
        found = [each for each in [checkpoint(os.path.realpath(asked))] if each]
    tuned = []
    listed = known_runs(runs_dir, [])
    names = [each["run_id"] for each in listed]
    for each in listed:
        if (each["config"] or {}).get("stage") == "sft":
            own = newest_checkpoint(os.path.join(runs_dir, each["run_id"]))[0]
            tuned.append({**each, "has_checkpoint": own is not None})
    known = os.path.exists(os.path.join(runs_dir, run, "run.json")) if run else False
    about = {"state_dir": params["state_dir"], "run": run, "known": known or bool(found), "runs": names}
    return {**about, "tuned": tuned, "checkpoints": found}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "run": {"type": "str", "default": ""},
            "checkpoint": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    with acting_as(module.params["user"]):
        result = read(module.params)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
