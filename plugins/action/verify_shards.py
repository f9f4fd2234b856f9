"""Action plugin: call the module verify_shards, unless launch_state has read the same facts."""

from __future__ import annotations

from ansible_collections.nanofleet.fleet.plugins.module_utils.known_action import KnownAction


class ActionModule(KnownAction):
    """The action `verify_shards` (see KnownAction)."""
