"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: doctor_report
short_description: Report what the doctor found
description:
  - Makes findings from what the tasks of the role doctor measured on all hosts.
  - Keeps a report without errors on the controller. A report with errors removes the kept one. In check mode
    the kept report stays unchanged.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  limits:
    description: >-
      Ports of a run (port_low, port_high, store_port) and limits of findings (slow_mbit, slow_rtt_ms,
      min_free_gib, max_skew_s).
    type: dict
    required: true
  begun: {description: Unix time at which the check began., type: float, required: true}
  quick: {description: Whether rates and all-reduces were left out., type: bool, required: true}
  file: {description: "File to write the report to, as JSON; empty for none.", type: str, required: true}
  kept: {description: Folder with the last report without errors of each fleet., type: path, required: true}
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
