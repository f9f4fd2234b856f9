"""A host that is down does not prevent the stop of the other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_the_check_of_claims_goes_past_a_host_that_is_down(tmp_path: Path) -> None:
    """Play-wide any_errors_fatal would end the play on all hosts, ignore_unreachable or not."""
    playbook = tmp_path / "play.yml"
    after = {"name": "After", "hosts": "fleet", "gather_facts": False}
    check = {"name": "Check", "ansible.builtin.import_playbook": str(ROOT / "playbooks" / "check_claim.yml")}
    playbook.write_text(
        yaml.safe_dump([check, {**after, "tasks": [{"ansible.builtin.debug": {"msg": "on"}}]}])
    )
    up = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {"tower": up, "laptop": {"ansible_host": "127.0.0.9", "ansible_port": 1}}
    inventory = tmp_path / "hosts.yml"
    claim = {"claim_fleet_id": "home", "claim_hosts": {}, "claim_path": str(tmp_path / "fleet.json")}
    inventory.write_text(yaml.safe_dump({"fleet": {"hosts": hosts, "vars": claim}}))
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), str(playbook)], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip
    assert "laptop" in done.stdout
    assert re.search(r"ok: \[tower\] => *\n *msg: '?on", done.stdout), done.stdout
