# SPDX-License-Identifier: MIT
"""Lookup plugin: whether the tasks of a play run as root on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.plugins.lookup import LookupBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import may_become_root


class LookupModule(LookupBase):
    """The lookup `nanofleet.fleet.as_root`: False if ansible_become is false and ansible_user is not root."""

    def run(
        self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[bool]:
        given, names = variables or {}, ("ansible_become", "ansible_user")
        host = {name: self._templar.template(given[name]) for name in names if name in given}
        return [may_become_root(host) or host.get("ansible_user") == "root"]
