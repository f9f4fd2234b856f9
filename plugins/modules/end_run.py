"""Documentation of the action of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: end_run
short_description: End the active run of a host at once
description:
  - Reads the run's state and ends its unit in one task.
    A host that does not answer delays every task that follows.
  - Calls the modules M(nanofleet.fleet.run_state) and M(nanofleet.fleet.transient_unit) on the host.
  - Nothing is saved.
options:
  state_dir: {description: Folder with the runs., type: path, required: true}
  user: {description: "Whose rights files are read with, if root reads them.", type: str, required: true}
  run_id: {description: "The run; empty for the one that is active.", type: str, required: true}
  ports:
    description: TCP ports which the unit's processes must no longer listen on.
    type: list
    elements: int
    required: true
  grace: {description: Seconds until SIGKILL., type: int, required: true}
attributes:
  action: {support: full}
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
"""

RETURN = r"""
ended: {description: The processes that were in the unit., type: list, elements: dict, returned: always}
run_id: {description: The run that was ended., type: str, returned: changed}
"""
