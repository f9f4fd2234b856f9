"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: check_settings
short_description: Check extra vars and settings before any host is changed
description:
  - Refuses unknown C(-e) names, with the nearest known one, and values of the wrong type or range.
  - Runs on the controller and connects to no host.
options:
  hosts:
    description: The hosts whose inventory variables are checked together with the extra vars.
    type: list
    elements: str
    default: []
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Check the settings
  nanofleet.fleet.check_settings:
    hosts: [tower, laptop]
"""

RETURN = r"""
findings: {description: "One entry a finding, with its code.", type: list, elements: dict, returned: success}
message: {description: "The findings as a table, or empty.", type: str, returned: success}
"""
