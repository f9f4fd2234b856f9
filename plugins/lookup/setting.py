# SPDX-License-Identifier: MIT
"""Lookup plugin: the value of a setting, or its declared default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import setting_defaults


class LookupModule(LookupBase):
    """The lookup `nanofleet.fleet.setting`: the value of a variable, or the default of the setting."""

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
                raise AnsibleLookupError(
                    f"There is no setting {name} with a default. Check the name in the playbook."
                )
        return found
