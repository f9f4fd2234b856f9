# SPDX-License-Identifier: MIT
"""Lookup plugin: the settings of a run that are set as variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.plugins.lookup import LookupBase
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig


class LookupModule(LookupBase):
    """The lookup plugin `nanofleet.fleet.run_settings`."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        given = variables or {}
        names = {name: name for name in RunConfig.field_names()} | {"steps": "num_iterations"}
        found = {field: self._templar.template(given[name]) for name, field in names.items() if name in given}
        return [{field: value for field, value in found.items() if value != ""}]
