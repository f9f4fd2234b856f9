"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: doctor_due
short_description: Decide whether the doctor checks the fleet before a run
description: Compares the present state of the hosts with that in the fleet's last report without errors.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  limits: {description: "Ports of a run, as in M(nanofleet.fleet.doctor_report).", type: dict, required: true}
  kept: {description: Folder with the last such report of each fleet., type: path, required: true}
  when: {description: auto if it has changed., type: str, choices: [auto, always, never], required: true}
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
reason: {description: "Why the fleet is to be checked; empty if it is not.", type: str, returned: success}
"""
