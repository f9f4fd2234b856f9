"""Whether plays become root on a host. Used on the controller only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean


def may_become_root(variables: Mapping[str, Any]) -> bool:
    """Whether plays may become root there; ansible_become: false in the inventory forbids it."""
    return bool(boolean(variables.get("ansible_become", True), strict=False))


def becomes_root(ansible_become: Any, ansible_user: str = "") -> bool:
    """Whether tasks of a host run as root: by becoming root, or because the login user is root."""
    return may_become_root({"ansible_become": ansible_become}) or ansible_user == "root"
