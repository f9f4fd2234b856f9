"""Action plugin: what the module run_state has to read is perhaps known."""

from __future__ import annotations

from ansible_collections.nanofleet.fleet.plugins.module_utils.known_action import KnownAction


class ActionModule(KnownAction):
    """Calls the module run_state."""
