"""Filters that quote values for systemd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    systemd_quote,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "systemd_quote": systemd_quote.systemd_quote,
            "systemd_line": systemd_quote.systemd_line,
            "systemd_env": systemd_quote.systemd_env,
        }
