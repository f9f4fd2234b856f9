"""The default port range of a run as the role network declares it, in the forms that tests compare with."""

from __future__ import annotations

from pathlib import Path

import yaml

_DEFAULTS = yaml.safe_load(
    (Path(__file__).resolve().parents[1] / "roles" / "network" / "defaults" / "main.yml").read_text()
)
LOW: int = _DEFAULTS["network_port_low"]
HIGH: int = _DEFAULTS["network_port_high"]
DASHED = f"{LOW}-{HIGH}"
"""As nftables, PowerShell and the messages write the range."""
COLON = f"{LOW}:{HIGH}"
"""As ufw and iptables write it."""
