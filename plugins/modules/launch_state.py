#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read in one call what train.yml compares before it starts a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.environment_reading import read_environment
from ansible_collections.nanofleet.fleet.plugins.module_utils.network_reading import read_network
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_reading import read_state
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.shard_digests import verify


def read(p: dict[str, Any], check_mode: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a module, its result) for each module whose result could be read.

    p: options of launch_state. A reading that fails yields nothing: its module is called later and reports
    the error. check_mode: do not store the sha256 of the shards.
    """
    failures = (OSError, RuntimeError, ValueError)
    with contextlib.suppress(*failures):
        yield "network_links", read_network(p["targets"])
    with contextlib.suppress(*failures):
        yield "run_state", read_state(p)
    with contextlib.suppress(*failures):
        yield "installed_environment", read_environment(p["python"])
    if p["data"]:
        with contextlib.suppress(*failures), acting_as(p["user"]):
            yield "verify_shards", verify(Path(p["data"]), "", not check_mode)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "str", "required": True},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "run_id": {"type": "str", "required": True},
            "ports": {"type": "list", "elements": "int", "default": []},
            "log_lines": {"type": "int", "default": 20},
            "manifest": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "data": {"type": "path"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **dict(read(module.params, module.check_mode)))


if __name__ == "__main__":
    main()
