"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: bench_plan
short_description: Decide which benchmark stages are measured
description:
  - Leaves out the stages whose figures are there, of the same hosts, depth, context and micro-batch.
  - Fails for a name that is no stage.
options:
  asked: {description: "Names of stages with commas; empty for all.", type: str, required: true}
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  gpu_hosts: {description: Those with a GPU., type: list, elements: str, required: true}
  config: {description: Settings of the measured runs., type: dict, required: true}
  tokens: {description: "Tokens of a step, where no stages are named.", type: int, required: true}
  steps: {description: Steps that are measured in each stage., type: int, required: true}
  folder: {description: Folder of the figures., type: path, required: true}
  again: {description: Whether all stages are measured again., type: bool, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Decide what is measured
  nanofleet.fleet.bench_plan:
    asked: exact-4096
    hosts: [tower, laptop]
    gpu_hosts: []
    config: {depth: 4}
    tokens: 4096
    steps: 5
    folder: artifacts/bench/stages
    again: false
  run_once: true
  register: plan
"""

RETURN = r"""
left: {description: Stages that are measured., type: list, elements: dict, returned: success}
message: {description: What is measured., type: str, returned: success}
"""
