"""Runs followed through Ansible itself, over hosts that are this machine."""

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from fleet import inventory, playbooks, progress, stages, watch
from fleet.__main__ import main
from fleet.playbooks import Job

FAKE_RUN_STATE = """
import os, time
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule({"rank": {"type": "int"}, "folder": {"type": "path"}}, supports_check_mode=True)
mark = os.path.join(module.params["folder"], "calls-%d" % module.params["rank"])
with open(mark, "a") as file:
    file.write("x")
step = os.path.getsize(mark)
folder, rank = module.params["folder"], module.params["rank"]
there = os.listdir(folder)
returns = "returns" in there
rebooted = 1000.0 if "reboots" in there and rank == 1 and step >= 2 else None
calls = [os.path.getsize(os.path.join(folder, name)) for name in there if name.startswith("calls-")]
if returns and step >= 2 and (len(calls) < 2 or min(calls) <= 2):  # until both have returned
    rebooted = time.time() - 10
ended = bool(rebooted) or step >= 3
made = min(step, 3)  # a host may be read once more while the other one ends
beat = {"rank": rank, "phase": "done" if ended else "forward", "step": made,
        "num_iterations": 3, "loss": 9.0 - made, "tok_per_s": 100.0, "eta_seconds": 1.0, "age": 0.1}
outcome = {"outcome": "finished", "reason": "All 3 steps were taken.", "step": 3, "loss": 6.0,
           "settled": True}
if "reboots" in there:
    outcome = {"outcome": "retryable", "reason": "Lost rank 1 (b).", "step": 3, "settled": False}
with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
    file.write('{"step": 1, "loss": 8.5}\\n')
module.exit_json(changed=False, found=True, run_id="t", run_dir=folder, ended=ended, between=False,
                 error=[], unit={"active_state": "active"}, heartbeats=[beat], failed_unit=False,
                 rebooted=rebooted, at_boot=returns, time=time.time(), runs=[], active_units=[],
                 past_attempts=[], checkpoint=None, checkpoint_time=None, evaluation=None,
                 stop_requested=False, run_file=None, outcome=outcome if ended and not rebooted else None)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own: two local hosts, a run of three looks, and a long playbook."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "run_state.py").write_text("#!/usr/bin/python\n" + FAKE_RUN_STATE)
    (tmp_path / "ansible.cfg").write_text("[defaults]\nlibrary = library\n")
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {name: host | {"rank": rank} for rank, name in enumerate(("a", "b"))}
    groups = {"coordinator": {"hosts": {"a": hosts["a"]}}, "workers": {"hosts": {"b": hosts["b"]}}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"fleet": {"children": groups}}))
    watch_play = {
        "name": "Watch",
        "hosts": "fleet",
        "gather_facts": False,
        "tasks": [
            {
                "name": "Watch the run",
                "run_state": {"rank": "{{ rank }}", "folder": str(tmp_path)},
                "register": "x",
                "until": "x.ended",
                "retries": 20,
                "delay": 0,
            }
        ],
    }
    (tmp_path / "watch.yml").write_text(json.dumps([watch_play]))
    long = {"name": "Wait", "hosts": "fleet", "gather_facts": False}
    long["tasks"] = [{"name": "Sleep", "ansible.builtin.command": "sleep 60"}]  # type: ignore[assignment]
    (tmp_path / "long.yml").write_text(json.dumps([long]))
    for module in (playbooks, inventory):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(playbooks, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(watch, "WATCH", "watch.yml")
    return tmp_path


@pytest.mark.processes
class TestThroughAnsibleRunner:
    def test_follows_a_run_to_its_end(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=100))
        follower = watch.RunFollower(screen, str(fake / "hosts.yml"), [])
        assert follower.follow() == watch.FINISHED
        view = follower.view
        assert [rank.host for rank in view.ranks] == ["a", "b"]
        assert (view.figures["step"], view.loss, view.outcome, view.coordinator) == (3, 6.0, "finished", "a")
        assert 2 in view.losses  # a retry on the way was heard
        assert (fake / "cache" / "logs" / "watch.log").exists()

    def test_a_rebooted_host_without_a_boot_entry_comes_with_its_command(self, fake: Path) -> None:
        (fake / "reboots").touch()
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.RunFollower(screen, str(fake / "hosts.yml"), [])
        assert follower.follow() == watch.FAILED
        printed = screen.console.file.getvalue()  # type: ignore[attr-defined]
        assert printed.count("Rebooted:    b at ") == 1
        typed = f"ansible-playbook -i {fake / 'hosts.yml'} train.yml -e run_id=t"
        assert f"Restart it: {typed}" in " ".join(printed.split())
        assert [typed in line for line in follower.view.reboots] == [True]

    def test_a_run_whose_hosts_start_it_again_is_not_over(
        self, fake: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watch, "_RETRY_SECONDS", (0, 0))
        (fake / "returns").touch()
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.RunFollower(screen, str(fake / "hosts.yml"), [])
        assert follower.follow() == watch.FINISHED
        assert "the run restarts by itself on a, b" in screen.console.file.getvalue()  # type: ignore[attr-defined]

    def test_ctrl_c_ends_a_playbook_and_its_workers(self, fake: Path) -> None:
        job = Job("long", "long.yml", inventory=str(fake / "hosts.yml"))
        started = time.monotonic()

        def tick() -> None:
            if len(job.stage.waiting) == 2:
                raise KeyboardInterrupt

        with pytest.raises(playbooks.CancelledError):
            job.follow(tick)
        assert time.monotonic() - started < 30
        with pytest.raises(ProcessLookupError):
            os.kill(job.stage.pid, 0)

    def test_a_missing_playbook_shows_ansibles_own_words(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        assert not stages.run_playbook(screen, Job("none", "none.yml", inventory=str(fake / "hosts.yml")))
        assert "none.yml" in screen.console.file.getvalue()  # type: ignore[attr-defined]

    def test_a_command_that_fails_shows_what_it_reported(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        good, _ = stages.run_command(
            screen, "corpus", "reading", [sys.executable, "-c", "import sys; sys.exit('no disk')"]
        )
        assert not good
        assert "no disk" in screen.console.file.getvalue()  # type: ignore[attr-defined]


def test_leaving_a_run_shows_it_goes_on(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(self: watch.RunFollower) -> int:
        raise playbooks.CancelledError

    monkeypatch.setattr(watch.RunFollower, "follow", leave)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["watch", "-i", str(fake / "hosts.yml")]) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    printed = capsys.readouterr().err
    assert "a run that has started continues" in printed
    assert "python -m fleet watch -i" in printed
    assert "stop.yml" in printed
