"""Presets: named settings of a run, for `train.yml -e preset=NAME` and `trainer train --preset NAME`.

Nothing of the trainer is imported, so that the installed collection can apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# The settings of the length of a run; the playbooks call num_iterations steps.
LENGTHS = frozenset({"num_iterations", "target_flops", "target_param_data_ratio", "steps"})


class PresetError(ValueError):
    """Raised for an unknown preset. The message is a sentence for the user."""


class Preset(NamedTuple):
    """Settings of a run that are applied together. help: purpose of the preset. settings: {name: value}."""

    help: str
    settings: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "smoke": Preset(
        "10 steps of a small model, without a tracker: whether hosts, data and connections work",
        {
            "depth": 4,
            "head_dim": 64,
            "sequence_len": 512,
            "device_batch_size": 2,
            "total_batch_size": 2048,  # 4 rows: up to 4 ranks, 2 each on two hosts
            "num_iterations": 10,
            "eval_every": 5,
            "eval_tokens": 8192,
            "sample_every": 10,
            "tracker": "none",
        },
    )
}


def apply_preset(
    name: str, given: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings of a run that is requested with the preset `name`: {setting: value}. "" is no preset.

    given: settings of this command, which replace those of the preset. stored: settings of the inventory,
    which the preset replaces. The settings in LENGTHS replace each other: num_iterations of the preset also
    removes target_flops of the inventory. Raises PresetError for an unknown preset.
    """
    if not name:
        return {**(stored or {}), **given}
    if name not in PRESETS:
        raise PresetError(f"preset is {name!r}: it takes {' or '.join(PRESETS)}.")
    return _replace(_replace(stored or {}, PRESETS[name].settings), given)


def _replace(before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `before` updated with `values`; LENGTHS in `before` are dropped if `values` has any."""
    dropped = LENGTHS if values.keys() & LENGTHS else frozenset()
    return {**{name: value for name, value in before.items() if name not in dropped}, **values}
