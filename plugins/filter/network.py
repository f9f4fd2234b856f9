"""Filters of the role network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    network_interfaces,
    network_rules,
)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "network_resolve": network_interfaces.resolve,
            "network_choose": network_interfaces.choose,
            "network_peer_findings": network_interfaces.peer_findings,
            "network_lines": network_interfaces.lines,
            "network_sources": network_rules.sources,
            "network_rules": network_rules.rules,
            "network_firewall_findings": network_rules.firewall_findings,
            "network_port_findings": network_rules.port_findings,
            "network_owner_findings": network_rules.owner_findings,
            "network_filter_findings": network_rules.filter_findings,
            "network_removed_rule": network_rules.removed_rule,
        }
