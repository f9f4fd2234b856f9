"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: doctor_due
short_description: Decide whether the doctor examines the fleet before a run
description: Compares what the hosts are with their last good report.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  limits: {description: "Ports of a run, as in M(nanofleet.fleet.doctor_report).", type: dict, required: true}
  kept: {description: Folder of the last good report of each fleet., type: path, required: true}
  when: {description: When to examine., type: str, choices: [auto, always, never], required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Decide whether to examine the fleet
  nanofleet.fleet.doctor_due:
    hosts: [tower, laptop]
    limits: {port_low: 20000, port_high: 20999, store_port: 29500}
    kept: .cache/doctor
    when: auto
  run_once: true
  register: due
"""

RETURN = r"""
reason: {description: "Why to examine the fleet; empty if it need not be.", type: str, returned: success}
"""
