#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the checkpoints that a fine-tuning may begin with, and the runs of stage sft.

All files are read with the rights of the service user, which reads the checkpoint again when it trains.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_dir import (
    RUN_ID,
    known_runs,
    names_in,
    newest_checkpoint,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as

META = ("run_id", "step", "schema", "config", "sha256", "hashes")
STEP = re.compile(r"step_[0-9]+")


def checkpoints(run_dir: str) -> list[dict[str, Any]]:
    """The complete checkpoints of a run, the oldest first."""
    folder = os.path.join(run_dir, "checkpoints")
    paths = [os.path.join(folder, name) for name in names_in(folder) if STEP.fullmatch(name)]
    return [found for path in paths if (found := checkpoint(path))]


def checkpoint(path: str) -> dict[str, Any] | None:
    """{"path", "meta"} of the checkpoint in a folder; None without meta.json, which is written last."""
    meta = load_json(os.path.join(path, "meta.json"))
    return {"path": path, "meta": {name: meta.get(name) for name in META}} if meta else None


def read(params: dict[str, Any]) -> dict[str, Any]:
    """The result of the module: checkpoints of a base run, and runs of stage sft. params: its options."""
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
    return {"run": run, "known": known or bool(found), "runs": names, "tuned": tuned, "checkpoints": found}


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
