# SPDX-License-Identifier: MIT
"""Lookup: the value of a setting, or the default with which it is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.setting_defaults import setting_defaults

DOCUMENTATION = r"""
name: setting
short_description: Value of a setting, or its default
description:
  - Returns the variable of this name, or, where nobody set it, the default of the role or of the list of
    settings that declares it. So a default is written once.
options:
  _terms: {description: Names of settings., required: true}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Show the first port of Gloo's listeners
  ansible.builtin.debug:
    msg: "{{ lookup('nanofleet.fleet.setting', 'network_port_low') }}"
"""

RETURN = r"""
_raw: {description: The values., type: list, elements: raw}
"""


class LookupModule(LookupBase):
    """Ansible's entry point."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        found = []
        for name in terms:
            if variables and name in variables:
                found.append(self._templar.template(variables[name]))
            elif name in setting_defaults():
                found.append(setting_defaults()[name])
            else:
                raise AnsibleLookupError(f"{name} is not a setting with a default.")
        return found
