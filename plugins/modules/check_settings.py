"""Documentation of the action of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_knobs
short_description: Check extra vars and knobs before a host is touched
description:
  - Refuses C(-e) names that nobody reads, with the nearest known one, and values of the wrong type or range.
  - Runs on the controller; see action_plugins/preflight_knobs.py.
options:
  hosts:
    description: The hosts whose inventory variables are checked together with the extra vars.
    type: list
    elements: str
    default: []
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Check the knobs
  preflight_knobs:
    hosts: [tower, laptop]
"""

RETURN = r"""
findings:
  description: One entry a finding, with what was typed, what is wrong and what to type instead.
  returned: always
  type: list
  elements: dict
"""
