#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the versions in a run's Python environment, which a start compares across hosts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: installed_environment
short_description: Read the versions in a run's Python environment
description:
  - Runs under the Python of that environment. Set C(ansible_python_interpreter) of the task to it.
  - Fails if torch or the trainer is missing. Changes nothing.
attributes:
  check_mode: {support: full}
options: {}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Read what is installed
  nanofleet.fleet.installed_environment:
  vars:
    ansible_python_interpreter: /opt/nanofleet/venv/bin/python
"""

RETURN = r"""
installed:
  description: environment (name of its folder), machine, python and torch (versions), trainer (digest).
  type: dict
  returned: success
"""


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        from trainer.config import code_digest

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
    module.exit_json(changed=False, installed=installed)


if __name__ == "__main__":
    main()
