"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: check_hosts
short_description: Check that every host can be set up or can train
description:
  - Makes findings from the facts that the role preflight has read on all hosts.
  - Fails with the findings of all hosts if one of them is a refusal.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  limits:
    description: Requirements (free_gb, skew_s, pythons, architectures), and addresses by host.
    type: dict
    required: true
  run:
    description: The run - asked (whether one is requested), config (its settings) and nproc_per_node.
    type: dict
    required: true
  holds_sleep: {description: Whether runs keep their hosts awake., type: bool, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Check the hosts
  nanofleet.fleet.check_hosts:
    hosts: "{{ ansible_play_hosts_all }}"
    limits: {free_gb: 3, skew_s: 5, pythons: ["3.11"], architectures: [x86_64], addresses: {tower: 10.0.0.1}}
    run: {asked: false, config: {}, nproc_per_node: 1}
    holds_sleep: true
  run_once: true
"""

RETURN = r"""
findings: {description: "One entry a finding, with its code.", type: list, elements: dict, returned: success}
message: {description: "The findings as a table, or empty.", type: str, returned: success}
"""
