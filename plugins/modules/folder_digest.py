#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: the sha256 over names and contents of all files below a folder, to compare copies of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as


def digest_of(folder: Path) -> dict[str, Any]:
    """found, sha256, files and bytes of a folder. Raises ValueError for a link, which no copy would have."""
    result: dict[str, Any] = {"found": folder.is_dir(), "sha256": "", "files": 0, "bytes": 0}
    if not result["found"]:
        return result
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link. Replace it by the file, and type the same command again")
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            whole.update(path.relative_to(folder).as_posix().encode() + b"\0" + content)
            result["files"] += 1
            result["bytes"] += path.stat().st_size
    return {**result, "sha256": whole.hexdigest()}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        with acting_as(module.params["user"]):
            result = digest_of(Path(module.params["path"]))
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"The folder {module.params['path']} cannot be read: {error}.")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
