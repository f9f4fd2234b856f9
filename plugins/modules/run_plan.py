"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: run_plan
short_description: Decide whether to start or resume a run, or refuse
description:
  - Decides from the states of all hosts and from what is installed on them.
  - Fails with a message if the run must not start, if a host is not set up, or if hosts differ in what is
    installed. The message contains what to type.
options:
  config: {description: Settings that were set for the run., type: dict, required: true}
  run_id: {description: "Name of the run; empty for the default.", type: str, required: true}
  states:
    description: Result of M(nanofleet.fleet.run_state) by host, in rank order.
    type: dict
    required: true
  manifests: {description: "Digest of each host's dataset, or empty.", type: dict, required: true}
  environments:
    description: C(installed) of M(nanofleet.fleet.installed_environment) by host; empty without one.
    type: dict
    default: {}
  shares: {description: "Batch split to use, or empty.", type: str, required: true}
  nproc_per_node: {description: Ranks on each host., type: int, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Decide whether to start or resume the run
  nanofleet.fleet.run_plan:
    config: {depth: 8}
    run_id: ""
    states: "{{ states }}"
    manifests: {tower: 2f6a, laptop: 2f6a}
    shares: ""
    nproc_per_node: 1
  run_once: true
  register: launch_plan
"""

RETURN = r"""
run_id: {description: Name of the run., type: str, returned: success}
file: {description: The run file., type: dict, returned: success}
action: {description: "start, resume or none.", type: str, returned: success}
message: {description: "Message for the person, or empty.", type: str, returned: success}
ends: {description: "Units to end first, by host.", type: dict, returned: success}
saves: {description: Whether the run is asked to save before its units end., type: bool, returned: success}
"""
