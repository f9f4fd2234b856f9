"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: compare_environments
short_description: Compare the environments of all hosts
description: Fails if files or versions on a host differ from those of most other hosts.
options:
  hosts: {description: "Names of the hosts, in rank order.", type: list, elements: str, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Compare the environments
  nanofleet.fleet.compare_environments:
    hosts: [tower, laptop]
  run_once: true
  register: environments
"""

RETURN = r"""
summary: {description: A sentence on what is the same on all hosts., type: str, returned: success}
"""
