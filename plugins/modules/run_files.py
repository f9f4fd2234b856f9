#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: list the files of a run on a host with their sha256, or compare copies with such a list."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as

KEPT = ("run.json", "metrics.jsonl", "train.log", "outcome.json", "attempts.jsonl", "sample.txt")


def listed(folder: str, name: str, sha256: str | None = None) -> dict[str, Any]:
    path = os.path.join(folder, name)
    if os.path.islink(path):
        raise ValueError(f"{path} is a link; only real files are fetched")
    size = os.stat(path).st_size
    return {"name": name, "size": size, "sha256": sha256 or sha256_of(path, size)}


def list_files(folder: str, checkpoint: str) -> list[dict[str, Any]]:
    """List the files of KEPT that a run has, and a checkpoint's meta.json and the files that it names.

    Returns [{"name", "size" (bytes), "sha256"}]. folder: the run directory. checkpoint: the path of the
    checkpoint relative to `folder`, "" for none. The sha256 of the files that meta.json names are those that
    it records. Raises ValueError if a file is a link, or if meta.json names a file outside of the checkpoint,
    FileNotFoundError if the checkpoint has no meta.json.
    """
    found = [listed(folder, name) for name in KEPT if os.path.isfile(os.path.join(folder, name))]
    if checkpoint:
        meta = checkpoint + "/meta.json"
        with open(os.path.join(folder, meta), encoding="utf-8") as file:
            sums = json.load(file)["sha256"]
        if any(os.path.isabs(name) or ".." in name.split("/") for name in sums):
            raise ValueError(f"{meta} names a file outside of {checkpoint}")
        found += [listed(folder, f"{checkpoint}/{name}", sha256) for name, sha256 in sums.items()]
        found.append(listed(folder, meta))
    return found


def faults(folder: str, expected: list[dict[str, Any]]) -> list[str]:
    """A phrase for each file that is missing in `folder` or differs; it begins with the file's name.

    folder: the folder of the copies. expected: the result of `list_files` on the host.
    """
    found = []
    for file in expected:
        path = os.path.join(folder, file["name"])
        if not os.path.isfile(path):
            found.append(f"{file['name']} is missing")
        elif sha256_of(path, int(file["size"])) != file["sha256"]:
            found.append(f"{file['name']} does not match its sha256")
    return found


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "checkpoint": {"type": "str", "default": ""},
            "expected": {"type": "list", "elements": "dict"},
        },
        supports_check_mode=True,
    )
    path, expected = module.params["path"], module.params["expected"]
    try:
        if expected is not None:
            module.exit_json(changed=False, faults=faults(path, expected))
        with acting_as(module.params["user"]):
            files = list_files(path, module.params["checkpoint"])
    except FileNotFoundError as error:
        # A run deletes old checkpoints when it writes new ones.
        module.fail_json(msg=f"{error.filename} is missing: the active run has removed it. Fetch again.")
    except (OSError, ValueError, KeyError) as error:
        module.fail_json(msg=f"The files of {path} cannot be listed: {error}.")
    module.exit_json(changed=False, files=files, bytes=sum(file["size"] for file in files))


if __name__ == "__main__":
    main()
