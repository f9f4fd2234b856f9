"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: follow_log
short_description: Print a host's part of a run's log as it grows
description:
  - Prints lines until the run has ended on the host, or Ctrl-C. Every host has a loop of its own.
  - Calls the module M(nanofleet.fleet.run_log) on the host again and again, with the options given here.
options:
  run_id: {description: The run., type: str, required: true}
  run_dir: {description: Its directory., type: path, required: true}
  user: {description: "Whose rights files are read with, if the module runs as root.", type: str, default: ""}
  cursor: {description: Where an earlier call of run_log ended., type: str, default: ""}
  lines: {description: The newest lines of each call at most., type: int, default: 100}
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
ended: {description: Whether the run has ended there., type: bool, returned: always}
"""
