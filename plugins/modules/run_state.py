#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the state of a run on this host from its unit and its run directory."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_reading import await_state


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "default": ""},
            "user": {"type": "str", "default": ""},
            "log_lines": {"type": "int", "default": 20},
            "wait_for": {"type": "str", "choices": ["none", "step", "end"], "default": "none"},
            "wait_seconds": {"type": "int", "default": 0},
            "ports": {"type": "list", "elements": "int", "default": []},
            "claim": {"type": "path"},
            "manifest": {"type": "path"},
            "known": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        state = params["known"] or await_state(params)
    except (OSError, RuntimeError) as error:
        module.fail_json(msg=f"The state of the runs in {params['state_dir']} cannot be read: {error}")
    module.exit_json(changed=False, **state)


if __name__ == "__main__":
    main()
