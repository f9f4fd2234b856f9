"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: end_run
short_description: End a run on a host and record who ended it
description:
  - Reads the run's state, ends its unit, and writes an outcome where the ranks have left none that is final.
  - One task. A host that does not answer delays every task that follows.
  - Calls the modules M(nanofleet.fleet.run_state), M(nanofleet.fleet.transient_unit) and
    M(nanofleet.fleet.run_directory) on the host.
  - Saves nothing.
options:
  state_dir: {description: Folder with the runs., type: path, required: true}
  user: {description: "Whose rights files are read with, if root reads them.", type: str, required: true}
  run_id: {description: "The run; empty for the one that is active.", type: str, required: true}
  ports:
    description: TCP ports which the unit's processes must no longer listen on.
    type: list
    elements: int
    required: true
  grace: {description: "Seconds until SIGKILL; -1 leaves that to the unit.", type: int, default: -1}
  outcome: {description: Outcome to record., type: str, choices: [stopped, retryable], required: true}
  reason: {description: Its reason., type: str, required: true}
  log_lines: {description: Lines of an error in the state at most., type: int, default: 20}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: End the run at once
  nanofleet.fleet.end_run:
    state_dir: /var/lib/nanofleet
    user: nanofleet
    run_id: ""
    ports: [29500]
    grace: 4
    outcome: stopped
    reason: Stopped by hand.
"""

RETURN = r"""
ended: {description: The processes that were in the unit., type: list, elements: dict, returned: success}
run_id: {description: The run that was ended., type: str, returned: where there was one}
state: {description: "The run's state afterwards, as run_state returns it.", type: dict, returned: success}
"""
