# SPDX-License-Identifier: MIT
"""Lookup plugin: the settings of a run that are set as variables or by a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible.utils.vars import load_extra_vars
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig
from ansible_collections.nanofleet.fleet.trainer.presets import PresetError, apply_preset


class LookupModule(LookupBase):
    """The lookup `nanofleet.fleet.run_settings`: {name: value} of the settings of the requested run."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        given = variables or {}
        names = {name: name for name in RunConfig.field_names()} | {"steps": "num_iterations"}
        found = {name: self._templar.template(given[name]) for name in names if name in given}
        values = {name: value for name, value in found.items() if value != ""}
        typed = load_extra_vars(self._loader)  # they replace the settings of a preset, the inventory's do not
        of_command = {names[name]: value for name, value in values.items() if name in typed}
        stored = {names[name]: value for name, value in values.items() if name not in typed}
        preset = self._templar.template(given.get("preset", ""))
        try:
            return [apply_preset(str(preset or ""), of_command, stored)]
        except PresetError as error:
            raise AnsibleLookupError(str(error)) from None
