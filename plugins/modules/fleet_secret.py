#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: keep the secret of the fleet in its file, replace it by a given one, or generate one."""

from __future__ import annotations

import grp
import os
import secrets
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.secret_file import differences, read_secret


def write(path: str, secret: str, group: str) -> None:
    """Write the secret to the file `path`, which is replaced atomically.

    group: the group that may read the file, "" for none. No other group can read it at any time.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".nanofleet-")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        if group:
            os.fchown(file.fileno(), -1, grp.getgrnam(group).gr_gid)
        os.fchmod(file.fileno(), 0o640 if group else 0o600)
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "group": {"type": "str", "default": ""},
            "secret": {"type": "str", "default": "", "no_log": True},
        },
        supports_check_mode=True,
    )
    path, group, given = (module.params[name] for name in ("path", "group", "secret"))
    kept = read_secret(path)
    secret = given or kept or secrets.token_hex(32)
    changed = secret != kept or bool(differences(path, group))
    if changed and not module.check_mode:
        try:
            write(path, secret, group)
        except (OSError, KeyError) as error:
            module.fail_json(msg=f"The secret of the fleet, {path}, could not be written: {error}")
    module.exit_json(changed=changed, secret=secret)


if __name__ == "__main__":
    main()
