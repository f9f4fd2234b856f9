"""Decides from inventory variables whether tasks of a host run as root. Used on the controller only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean


def may_become_root(variables: Mapping[str, Any]) -> bool:
    """Whether plays may become root on a host: False only if its variables set ansible_become: false."""
    return bool(boolean(variables.get("ansible_become", True), strict=False))
