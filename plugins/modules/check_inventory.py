"""Documentation of the action of the same name, which runs on the controller."""

DOCUMENTATION = r"""
module: check_inventory
short_description: Check that the inventory is a fleet
description: Fails unless there is exactly one coordinator, and each host is listed once and has an address.
options:
  addresses: {description: Address by host., type: dict, required: true}
  coordinators: {description: Hosts of the group coordinator., type: list, elements: str, required: true}
  workers: {description: Hosts of the group workers., type: list, elements: str, required: true}
  members: {description: Hosts of the group fleet., type: list, elements: str, required: true}
attributes:
  action: {support: full}
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Check the inventory
  nanofleet.fleet.check_inventory:
    addresses: {tower: 10.0.0.1, laptop: 10.0.0.2}
    coordinators: [tower]
    workers: [laptop]
    members: [tower, laptop]
"""

RETURN = r"""
findings: {description: "One entry a finding, with its code.", type: list, elements: dict, returned: success}
message: {description: "The findings as a table, or empty.", type: str, returned: success}
"""
