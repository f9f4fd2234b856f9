# SPDX-License-Identifier: MIT
"""Lookup plugin: the value of a setting, or its declared default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import setting_defaults

DOCUMENTATION = r"""
name: setting
short_description: Value of a setting, or its default
description:
  - Returns the variable of this name. If it is not set, returns the default from the role's
    defaults/main.yml or from declared_settings.yml of the role preflight.
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
_raw: {description: "The value of each setting, in the order of the names.", type: list, elements: raw}
"""


class LookupModule(LookupBase):
    """The lookup plugin `nanofleet.fleet.setting`."""

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
