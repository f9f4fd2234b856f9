#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the versions in a run's Python environment, which a start compares across hosts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        try:
            from trainer.code_digest import code_digest
        except ImportError:  # a release up to 0.1
            from trainer.config import code_digest  # type: ignore[attr-defined,no-redef]

        torch = importlib.metadata.version("torch")
    except ImportError as error:
        module.fail_json(
            msg=f"The environment {sys.prefix} is not complete: {error}. Fix: ansible-playbook setup.yml"
        )
    installed = {
        "environment": os.path.basename(os.path.realpath(sys.prefix)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch,
        "trainer": code_digest(),
    }
    module.exit_json(changed=False, installed=installed, cores=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
