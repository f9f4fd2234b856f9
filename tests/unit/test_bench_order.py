"""bench.yml's cases, by Ansible itself on two hosts of this machine: what a case does is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROLE = Path(__file__).resolve().parents[2] / "roles" / "bench"
CASE = """
- name: Note who measures what
  ansible.builtin.shell: echo '{{ __bench_case.name }} {{ inventory_hostname }}' >> {{ playbook_dir }}/order
- name: Note it once
  ansible.builtin.shell: echo '{{ __bench_case.name }} once' >> {{ playbook_dir }}/order
  run_once: true
"""
STAGES = {
    "single-1": ["a"],
    "exact-1": ["a", "b"],
    "single-2-on-b": ["b"],
    "exact-2": ["a", "b"],
    "single-3": ["a"],
    "single-4-on-b": ["b"],
}


@pytest.mark.processes
def test_cases_are_measured_in_the_order_asked(tmp_path: Path) -> None:
    """One host, neither before nor after the fleet's cases; and what is done once, by it."""
    tasks = tmp_path / "roles" / "bench" / "tasks"
    tasks.mkdir(parents=True)
    measure = [
        task
        for task in yaml.safe_load((ROLE / "tasks/main.yml").read_text())
        if task["name"] == "Measure what is left"
    ]
    (tasks / "main.yml").write_text(yaml.safe_dump(measure))
    shutil.copy(ROLE / "tasks/on_its_hosts.yml", tasks)
    (tasks / "case.yml").write_text(CASE)
    left = [{"name": name, "hosts": hosts} for name, hosts in STAGES.items()]
    variables = {"__bench_planned": {"left": left}, "ansible_python_interpreter": sys.executable}
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "roles": ["bench"]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    settings = tmp_path / "ansible.cfg"
    settings.write_text("")
    done = subprocess.run(
        ["ansible-playbook", "-i", "a,b,", "-c", "local", "play.yml"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_CONFIG": str(settings)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "order").read_text().splitlines()
    order = list(dict.fromkeys(line.split()[0] for line in lines))
    assert order == list(STAGES)
    for name, hosts in STAGES.items():
        assert sorted(line.split()[1] for line in lines if line.split()[0] == name) == [*hosts, "once"]
