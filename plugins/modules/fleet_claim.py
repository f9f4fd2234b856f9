#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: write, check or remove the claim, the file that names the fleet which a host serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.claim_file import (
    claim_text,
    merge,
    parse,
    refusal,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole


def read(path: str, host: str) -> tuple[str, dict[str, Any]]:
    """Read the claim file `path`. Returns (its text, its content as a dict); ("", {}) if there is no file.

    host: name of this host, for messages. Raises ValueError if the file cannot be read or is not a claim.
    """
    try:
        text = Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""
    except (OSError, UnicodeDecodeError) as error:
        about = f"The file {path} on {host}, which names its fleet,"
        raise ValueError(f"{about} cannot be read: {error}") from None
    return text, parse(text, path, host)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["claimed", "checked", "absent"], "default": "checked"},
            "fleet_id": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "hosts": {"type": "dict", "default": {}},
            "partial": {"type": "bool", "default": False},
            "by": {"type": "str", "default": ""},
            "at": {"type": "str", "default": ""},
            "controller": {"type": "str", "default": ""},
            "controllers": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    params = module.params
    path, state = params["path"], params["state"]
    try:
        before, claim = read(path, params["host"])
    except ValueError as error:
        if state == "checked":  # a refusal, like that of another fleet's host: it stops the play on all hosts
            unchanged = {"renamed": "", "controllers": [], "removed": [], "diff": {"before": "", "after": ""}}
            module.exit_json(changed=False, refusal=str(error), **unchanged)
        module.fail_json(msg=str(error))
    wanted = merge(claim, params)
    refused = refusal(claim, params["fleet_id"], wanted["hosts"], params["host"], params["partial"])
    after = {"claimed": claim_text(claim, params), "checked": before, "absent": ""}[state]
    after = before if refused else after
    if after != before and not module.check_mode:
        try:
            write_whole(path, after) if after else os.unlink(path)
            if not after and not os.listdir(os.path.dirname(path)):
                os.rmdir(os.path.dirname(path))
        except OSError as error:
            change = "written" if after else "removed"
            about = f"The file {path} on {params['host']}, which names its fleet,"
            module.fail_json(msg=f"{about} could not be {change}: {error}")
    old = claim.get("fleet_id", "")
    module.exit_json(
        changed=after != before,
        refusal=refused,
        renamed=old if old != params["fleet_id"] and not refused else "",
        controllers=wanted["controllers"],
        removed=[path] if before and not after else [],
        diff={"before": before, "after": after, "before_header": path, "after_header": path},
    )


if __name__ == "__main__":
    main()
