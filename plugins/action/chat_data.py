"""Action plugin: check the request for a fine-tuning, and name the data directory of its conversations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.chat_data import (
    chat_digest,
    command_options,
    file_findings,
    request_findings,
    sources_of,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import finding, reported
from ansible_collections.nanofleet.fleet.trainer.stages import SFT


class ActionModule(ControllerAction):
    """The action `chat_data`. It reads the files of conversations on the controller and writes none."""

    _VALID_ARGS = frozenset(
        {"stage", "from_run", "from_checkpoint", "conversations", "skip_bad", "tokenizer", "folder", "cache"}
    )

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        request = {name: str(asked.get(name) or "") for name in self._VALID_ARGS}
        findings = list(request_findings(request))
        if findings or request["stage"] != SFT:
            return reported(findings)
        tokenizer, skip_bad = Path(request["tokenizer"]), boolean(asked.get("skip_bad") or False)
        sources = sources_of(request["conversations"], Path(request["folder"]))
        if findings := list(file_findings(sources, tokenizer)):
            return reported(findings)
        try:
            digest = chat_digest(sources, tokenizer, skip_bad)
        except OSError as error:
            path = error.filename
            problem = f"The controller cannot read {path}, which the fine-tuning needs: {error.strerror}."
            fix = (
                f"if its permissions are the cause, let your user read it (chmod u+r {path} if the file is "
                "yours), then repeat the command"
            )
            return reported([finding("NF615", "conversations", problem, fix)])
        out = Path(request["cache"]) / digest
        return {
            "digest": digest,
            "folder": str(out),
            "options": [*command_options(sources, tokenizer, skip_bad), "--out", str(out)],
        }
