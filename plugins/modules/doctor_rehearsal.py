#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: measure the GEMM rate and all-reduces over Gloo with the Python of the runs."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.rehearsal import rehearse_in_child

DOCUMENTATION = r"""
module: doctor_rehearsal
short_description: Measure the GEMM rate and all-reduces over Gloo with the other hosts
description:
  - Runs under the Python of the run's environment, which has torch.
    Set C(ansible_python_interpreter) of the task to it.
  - All hosts of a rehearsal run it at the same time. It writes no file.
options:
  hosts: {description: "The hosts, in rank order.", type: list, elements: str, required: true}
  rank: {description: Rank of this host., type: int, required: true}
  master: {description: Address of the first host., type: str, required: true}
  port: {description: Port of the rendezvous store on it., type: int, required: true}
  rounds:
    description: Lists of pairs of ranks that all-reduce at the same time.
    type: list
    elements: list
    default: []
  seconds: {description: Length of each measurement., type: float, default: 0.4}
  join_timeout: {description: Seconds to wait for the other hosts., type: float, default: 20}
  timeout: {description: Seconds that a collective may take., type: float, default: 4}
  limit: {description: Seconds after which the rehearsal is ended., type: int, default: 50}
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Rehearse an all-reduce of two hosts
  nanofleet.fleet.doctor_rehearsal:
    hosts: [tower, laptop]
    rank: "{{ 0 if inventory_hostname == 'tower' else 1 }}"
    master: 192.168.1.10
    port: 29500
  vars:
    ansible_python_interpreter: /opt/nanofleet/venv/bin/python
"""

RETURN = r"""
rehearsal:
  description: >-
    hosts, torch (version), gemm_gflops (by dtype), allreduce_mbit (all hosts), pairs (by a-b), error.
  type: dict
  returned: when it ended within the limit
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "hosts": {"type": "list", "elements": "str", "required": True},
            "rank": {"type": "int", "required": True},
            "master": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "rounds": {"type": "list", "elements": "list", "default": []},
            "seconds": {"type": "float", "default": 0.4},
            "join_timeout": {"type": "float", "default": 20},
            "timeout": {"type": "float", "default": 4},
            "limit": {"type": "int", "default": 50},
        },
        supports_check_mode=True,
    )
    rehearsal = rehearse_in_child(module.params)
    if rehearsal is None:
        module.fail_json(msg=f"The rehearsal did not end within {module.params['limit']} s.")
    module.exit_json(changed=False, rehearsal=rehearsal)


if __name__ == "__main__":
    main()
