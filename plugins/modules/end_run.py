"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: end_run
short_description: End a run on a host and record who ended it
description:
  - Reads the run's state, ends its unit, and writes an outcome if the ranks have not written a final one.
  - It is one task, because a host that does not answer delays each further task.
  - Calls the modules M(nanofleet.fleet.run_state), M(nanofleet.fleet.transient_unit) and
    M(nanofleet.fleet.run_directory) on the host.
  - The run saves no checkpoint.
options:
  state_dir: {description: Folder that holds C(runs/RUN_ID)., type: path, required: true}
  user: {description: "User whose rights root uses to read files.", type: str, required: true}
  run_id: {description: "Name of the run; empty for the active one.", type: str, required: true}
  ports:
    description: TCP ports which the unit's processes must no longer listen on.
    type: list
    elements: int
    required: true
  grace: {description: "Seconds until SIGKILL; -1 for those of the unit.", type: int, default: -1}
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
ended: {description: Processes that were in the unit., type: list, elements: dict, returned: success}
run_id: {description: The run that was ended., type: str, returned: where there was one}
state: {description: "The run's state afterwards, as run_state returns it.", type: dict, returned: success}
"""
