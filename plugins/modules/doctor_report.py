"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: doctor_report
short_description: Report what the doctor found
description:
  - Judges what the tasks of the role doctor have measured on all hosts.
  - Keeps a good report on the controller, and removes it where the report is not good, except in check mode.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  limits: {description: "Ports of a run, and limits of the findings.", type: dict, required: true}
  begun: {description: "When the examination began, in seconds since the epoch.", type: float, required: true}
  quick: {description: Whether it was the quick form., type: bool, required: true}
  file: {description: "File for the report as JSON, or empty.", type: str, required: true}
  kept: {description: Folder of the last good report of each fleet., type: path, required: true}
  source: {description: "The dataset's folder on the controller.", type: path, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Make the report
  nanofleet.fleet.doctor_report:
    hosts: [tower, laptop]
    limits: {port_low: 20000, port_high: 20999, store_port: 29500, slow_mbit: 300, slow_rtt_ms: 10,
             min_free_gib: 1, max_skew_s: 5}
    begun: 1795392000.0
    quick: false
    file: ""
    kept: .cache/doctor
    source: data
  run_once: true
  register: report
"""

RETURN = r"""
good: {description: Whether nothing prevents training., type: bool, returned: success}
message: {description: The matrix and the findings., type: str, returned: success}
"""
