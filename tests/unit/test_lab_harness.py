"""What the tests with a lab rest on: hosts' keys are checked, and a recap is read by host."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.lab import Fleet, recap

RECAP = """
PLAY RECAP *********************************************************************
lab-1                      : ok=61   changed=3    unreachable=0    failed=0    skipped=28   rescued=0
localhost                  : ok=5    changed=0    unreachable=0    failed=0    skipped=0    rescued=0
"""


def test_a_recap_is_read_by_host() -> None:
    assert {host: counts["changed"] for host, counts in recap(RECAP).items()} == {"lab-1": 3, "localhost": 0}


def test_the_labs_playbooks_check_host_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANSIBLE_HOST_KEY_CHECKING", raising=False)
    playbook = tmp_path / "show.yml"
    playbook.write_text(
        "- hosts: localhost\n  connection: local\n  gather_facts: false\n  tasks:\n"
        "    - name: Show\n      ansible.builtin.debug:\n"
        "        msg: \"{{ lookup('ansible.builtin.config', 'HOST_KEY_CHECKING') }}\"\n"
    )
    shown = Fleet(tmp_path, None).play(str(playbook)).results("Show")
    assert [str(result["msg"]) for result in shown.values()] == ["True"]
