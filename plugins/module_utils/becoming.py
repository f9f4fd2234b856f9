"""Whether plays become root on a host. Used on the controller only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean


def may_become_root(variables: Mapping[str, Any]) -> bool:
    """Whether plays may become root there; ansible_become: false in the inventory forbids it."""
    return bool(boolean(variables.get("ansible_become", True), strict=False))
