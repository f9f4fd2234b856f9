"""Action plugin: decide with which settings and which checkpoint a run of stage sft begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import finding, reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.fine_tuning import FineTuningRefusedError, plan


class ActionModule(ControllerAction):
    """The action `fine_tuning_plan`. It reads the manifest of the conversations on the controller."""

    _VALID_ARGS = frozenset({"config", "run_id", "from_checkpoint", "found", "data", "sandboxed", "refuse"})

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        found, host = asked["found"], variables["inventory_hostname"]
        if "checkpoints" not in found:
            reason = str(found.get("msg") or "no answer").rstrip(".")
            problem = (
                f"The checkpoints of the base run on this host, the coordinator, cannot be read: {reason}."
            )
            fix = "correct the cause that follows 'cannot be read', then repeat the command"
            findings = [finding("NF436", host, problem, fix)]
            return reported(findings) if boolean(asked["refuse"]) else {}
        try:
            return plan(
                host,
                found,
                asked["config"],
                str(asked.get("run_id") or ""),
                str(asked.get("from_checkpoint") or ""),
                _tokenizer_of(str(asked.get("data") or "")),
                boolean(asked["sandboxed"]),
            )
        except FineTuningRefusedError as error:
            return reported([error.finding]) if boolean(asked["refuse"]) else {}


def _tokenizer_of(folder: str) -> str:
    """The sha256 of the tokenizer, from the manifest of a data directory; "" without a valid manifest."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
        return str(manifest["tokenizer_sha256"])
    except (OSError, ValueError, KeyError):
        return ""
