"""The tracker's address as URLs and Host headers have it, also where the fleet is on IPv6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROOT = Path(__file__).resolve().parents[2]
WIRING = "playbooks/group_vars/all.yml"
ROLE = "roles/tracker/vars/main.yml"


def rendered(path: str, name: str, **given: Any) -> Any:
    loader = DataLoader()
    variables = loader.load_from_file(str(ROOT / path), trusted_as_template=True)
    return Templar(loader=loader, variables={**variables, **given}).template(variables[name])


@pytest.mark.parametrize(
    ("address", "url"), [("10.0.0.1", "http://10.0.0.1:5000"), ("fd42::1", "http://[fd42::1]:5000")]
)
def test_the_tracker_has_the_same_address_for_all(address: str, url: str) -> None:
    fleet = {"fleet_hosts": ["tower"], "hostvars": {"tower": {"network_address": address}}}
    assert rendered(WIRING, "launch_tracker_uri", fleet_addresses={}, **fleet) == url
    assert rendered(WIRING, "launch_tracker_page", fleet_addresses={"tower": address}, **fleet) == url
    own = {"tracker_address": address, "tracker_port": 5000, "tracker_names": ["tower"]}
    assert rendered(ROLE, "__tracker_url", **own) == url
    assert url.removeprefix("http://").removesuffix(":5000") in rendered(ROLE, "__tracker_hosts", **own)
