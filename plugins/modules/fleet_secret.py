#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: keep the secret of the fleet in its file, replace it by a given one, or generate one."""

from __future__ import annotations

import grp
import secrets

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.secret_file import differences, read_secret


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
            gid = grp.getgrnam(group).gr_gid if group else -1
            write_whole(path, secret + "\n", 0o640 if group else 0o600, gid)  # no other group reads it
        except (OSError, KeyError) as error:
            module.fail_json(msg=f"The secret of the fleet, {path}, could not be written: {error}")
    module.exit_json(changed=changed, secret=secret)


if __name__ == "__main__":
    main()
