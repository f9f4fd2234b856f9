#!/usr/bin/python
"""Ansible module: compare the shards and the tokenizer of a data directory with its manifest, by sha256.

A second comparison reads only changed files. See module_utils/shard_digests.py.
"""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.shard_digests import verify


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest_sha256": {"type": "str", "default": ""},
            "user": {"type": "str", "default": ""},
            "known": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        with acting_as(p["user"]):
            result = p["known"] or verify(Path(p["path"]), p["manifest_sha256"], not module.check_mode)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
