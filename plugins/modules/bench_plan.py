"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: bench_plan
short_description: Select the benchmark cases to measure
description:
  - Leaves out cases with a result file for the same hosts, depth, context, micro-batch and enough steps.
  - Fails for an invalid name.
options:
  asked: {description: "Names of cases, separated by commas; empty for all.", type: str, required: true}
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
  gpu_hosts: {description: Names of the hosts with a GPU., type: list, elements: str, required: true}
  config: {description: Settings of the measured runs., type: dict, required: true}
  tokens: {description: "Tokens per step, if no cases are named.", type: int, required: true}
  steps: {description: Steps to measure in each case., type: int, required: true}
  folder: {description: Folder with the result files., type: path, required: true}
  again: {description: Whether to ignore existing result files., type: bool, required: true}
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
left: {description: Cases to measure., type: list, elements: dict, returned: success}
message: {description: A sentence that names the cases to measure., type: str, returned: success}
"""
