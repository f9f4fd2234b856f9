"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: follow_log
short_description: Print a host's part of a run's log as it grows
description:
  - Prints lines until the run has ended on the host, or until Ctrl-C. Each host has its own loop.
  - Calls the module M(nanofleet.fleet.run_log) on the host repeatedly, with the options given here.
options:
  run_id: {description: Name of the run., type: str, required: true}
  run_dir: {description: Run directory., type: path, required: true}
  user: {description: User whose rights root uses to read files., type: str, default: ""}
  cursor: {description: C(cursor) of an earlier result of run_log., type: str, default: ""}
  lines: {description: Most lines that each call returns., type: int, default: 100}
  steps: {description: Whether lines that report a step are printed., type: bool, default: true}
attributes:
  action: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Follow the log
  nanofleet.fleet.follow_log:
    run_id: d4-1a2b3c4d
    run_dir: /var/lib/nanofleet/runs/d4-1a2b3c4d
    cursor: "{{ read.cursor }}"
"""

RETURN = r"""
ended: {description: Whether the run has ended on the host., type: bool, returned: always}
"""
