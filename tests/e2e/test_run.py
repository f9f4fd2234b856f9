"""From bare hosts to a stopped run, with the playbooks a person types, over real SSH, ufw and systemd."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .lab import ENVIRONMENT, LAB, ROOT, Fleet, recap

pytestmark = pytest.mark.lab

TINY = {
    "depth": 2, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 2, "eval_tokens": 2048,
}  # fmt: skip
RUN = "/var/lib/nanofleet/runs"
HOSTS = (f"{LAB}-1", f"{LAB}-2")


def metrics(fleet: Fleet, run_id: str) -> list[dict[str, float]]:
    lines = fleet.on(HOSTS[0], f"cat {RUN}/{run_id}/metrics.jsonl").splitlines()
    return [entry for entry in map(json.loads, lines) if "loss" in entry]


def test_setup_makes_hosts_ready_and_a_second_run_changes_nothing(fleet: Fleet, dataset: Path) -> None:
    """Another module may have set the hosts up before this one."""
    fleet.on(HOSTS[1], "rm -f /etc/sysctl.d/60-nanofleet.conf")
    assert fleet.play("setup.yml", data_dir=dataset).changed() > 0
    assert fleet.play("setup.yml", data_dir=dataset).changed() == 0


def test_check_mode_after_setup_changes_nothing(fleet: Fleet, dataset: Path) -> None:
    """--check --diff on hosts that are ready: nothing would change, nothing fails."""
    dry = ["--check", "--diff", "-e", f"data_dir={dataset}"]
    done = subprocess.run(
        ["ansible-playbook", "-i", str(fleet.inventory), *dry, "setup.yml"],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counted = recap(done.stdout)
    assert {host: counted[host]["changed"] for host in HOSTS} == dict.fromkeys(HOSTS, 0), done.stdout


def test_a_run_trains_on_both_hosts_and_its_loss_falls(fleet: Fleet) -> None:
    started = fleet.play("train.yml", run_id="e2e", steps=20, **TINY).results("Start the unit")
    assert {host: result["changed"] for host, result in started.items()} == dict.fromkeys(HOSTS, True)
    for host in HOSTS:
        fleet.on(host, "systemctl daemon-reload")  # as setup.yml or apt does beside a run
    fleet.play("playbooks/watch.yml", run_id="e2e")
    steps = metrics(fleet, "e2e")
    assert [entry["step"] for entry in steps] == list(range(1, 21))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    for host in HOSTS:
        outcome = json.loads(fleet.on(host, f"cat {RUN}/e2e/outcome.json"))
        assert outcome["outcome"] == "finished", outcome
    assert json.loads(fleet.on(HOSTS[1], f"cat {RUN}/e2e/run.json"))["config"]["elastic"] == "true"
    digests = {fleet.on(host, f"sha256sum {RUN}/e2e/run.json").split()[0] for host in HOSTS}
    assert len(digests) == 1


def test_status_shows_both_hosts(fleet: Fleet) -> None:
    status = fleet.play("status.yml", run_id="e2e")
    assert status.changed() == 0
    for host in HOSTS:
        assert re.search(rf"^ *{host} +inactive +\d +done +20/20 ", status.stdout, re.MULTILINE), (
            status.stdout
        )
        assert fleet.on(host, "ls /etc/nanofleet 2>/dev/null || true") == "", (
            "the unit removed its boot entry"
        )
    assert "Outcome: finished: All 20 steps done" in " ".join(status.stdout.split())


def test_a_host_where_sudo_fails_hides_nothing_of_the_others(fleet: Fleet) -> None:
    """As where -K is forgotten and one host wants a password."""
    containers = {**os.environ, "CONTAINERS_CONF": str(ROOT / ".lab" / LAB / "containers.conf")}

    def move(source: str, target: str) -> None:
        subprocess.run(["podman", "exec", HOSTS[1], "mv", source, target], check=True, env=containers)

    move("/etc/sudoers.d/ops", "/root/ops")
    try:
        status = fleet.play("status.yml", fails=True, run_id="e2e").stdout
        stop = " ".join(fleet.play("stop.yml", fails=True, run_id="e2e").stdout.split())
    finally:
        move("/root/ops", "/etc/sudoers.d/ops")
    assert re.search(rf"^ *{HOSTS[0]} +inactive +0 +done +20/20 ", status, re.MULTILINE), status
    assert f"NF414: No answer from {HOSTS[1]}, so no run was stopped there." in stop


def test_logs_and_copies_come_and_a_second_copy_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    logs = fleet.play("logs.yml", run_id="e2e")
    assert logs.changed() == 0
    (shown,) = [result["msg"] for result in logs.results("Show the log").values() if "msg" in result]
    assert all(host in str(shown) for host in HOSTS)
    assert fleet.play("fetch.yml", run_id="e2e", fetch_to=tmp_path).changed() > 0
    assert len(list(tmp_path.glob("e2e/*/checkpoints/step_*/meta.json"))) >= 1
    assert fleet.play("fetch.yml", run_id="e2e", fetch_to=tmp_path).changed() == 0


def test_a_finished_run_reports_it(fleet: Fleet) -> None:
    again = fleet.play("train.yml", run_id="e2e", steps=20, **TINY)
    assert again.changed() == 0
    assert "finished" in again.stdout
    for host in HOSTS:
        assert fleet.on(host, "ls /etc/nanofleet 2>/dev/null || true") == "", "nothing returns at a boot"


def test_another_configuration_under_the_same_run_id_is_refused(fleet: Fleet) -> None:
    refused = fleet.play("train.yml", fails=True, run_id="e2e", steps=20, seed=7, **TINY)
    assert "seed was 42, now 7" in " ".join(refused.stdout.split())


def test_a_finished_run_is_extended(fleet: Fleet) -> None:
    """A longer horizon and settings of the runtime are no other configuration."""
    extended = fleet.play("train.yml", run_id="e2e", steps=30, **{**TINY, "device_batch_size": 1})
    assert "extended from 20 to 30 steps" in " ".join(extended.stdout.split())
    fleet.play("playbooks/watch.yml", run_id="e2e")
    assert [entry["step"] for entry in metrics(fleet, "e2e")] == list(range(1, 31))


def test_the_preset_smoke_trains_on_both_hosts(fleet: Fleet) -> None:
    """Its 2,048 tokens are 4 rows, two for each host. A setting beside it replaces that of the preset."""
    fleet.play("train.yml", preset="smoke", run_id="smoke", depth=2)
    fleet.play("playbooks/watch.yml", run_id="smoke")
    assert [entry["step"] for entry in metrics(fleet, "smoke")] == list(range(1, 11))
    lines = map(json.loads, fleet.on(HOSTS[0], f"cat {RUN}/smoke/metrics.jsonl").splitlines())
    assert [line["step"] for line in lines if "val_bpb" in line] == [5, 10]
    assert fleet.on(HOSTS[0], f"ls {RUN}/smoke/samples").split() == ["step_000010.txt"]
    config = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/smoke/run.json"))["config"]
    assert (config["depth"], config["head_dim"], config["sequence_len"]) == (2, 64, 512)
    assert config["tracker"] == "none"


def test_an_unknown_preset_is_refused_before_a_host_is_asked(fleet: Fleet) -> None:
    refused = fleet.play("train.yml", fails=True, preset="smok", run_id="smok")
    assert "preset is 'smok': it takes smoke." in " ".join(refused.stdout.split())
    assert fleet.on(HOSTS[0], f"ls {RUN}").split().count("smok") == 0


def test_start_twice_stop_and_resume(fleet: Fleet) -> None:
    fleet.play("train.yml", run_id="long", steps=4000, eval_every=0, **TINY)
    twice = fleet.play("train.yml", run_id="long", steps=4000, eval_every=0, **TINY)
    assert twice.changed() == 0
    assert re.search(rf"is active .*on {HOSTS[0]}, {HOSTS[1]}", " ".join(twice.stdout.split()))
    printed = fleet.on(HOSTS[1], "systemd-analyze security --no-pager nanofleet-long | tail -1")
    exposure = re.search(r"level for nanofleet-long\.service: ([0-9.]+)", printed)
    assert exposure, printed
    assert float(exposure[1]) <= 3.0, printed
    printed = fleet.play("stop.yml", run_id="long").stdout
    assert "ends after one more step" in printed
    stopped = json.loads(fleet.on(HOSTS[0], f"cat {RUN}/long/outcome.json"))
    assert stopped["outcome"] == "stopped", stopped
    assert 0 < stopped["step"] < 4000
    for host in HOSTS:
        assert fleet.on(host, "pgrep -u nanofleet -fc 'trainer [t]rain' || true") == "0"
        assert "29500" not in fleet.on(host, "ss -Htln")
    assert fleet.play("stop.yml", run_id="long").changed() == 0
    for playbook in ("status.yml", "logs.yml", "stop.yml"):
        assert "Did you mean long?" in fleet.play(playbook, fails=True, run_id="lonh").stdout

    fleet.play("train.yml", run_id="long", steps=4000, eval_every=0, **TINY)
    assert metrics(fleet, "long")[-1]["step"] > stopped["step"]
    # It cannot heed SIGTERM: what is ended at once must not wait for it.
    fleet.on(HOSTS[1], "kill -STOP $(pgrep -u nanofleet -f -- '-u -m trainer train')")
    fleet.play("stop.yml", run_id="long", stop_now=True)
    for host in HOSTS:
        assert fleet.on(host, "pgrep -u nanofleet -fc 'trainer [t]rain' || true") == "0"
    at_once = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/long/outcome.json"))
    assert "Stopped by stop.yml at once; nothing was saved" in at_once["reason"]
    assert fleet.on(HOSTS[0], f"ls {RUN}/long/checkpoints").split()[-1] == f"step_{stopped['step']:06d}"
    steps = [entry["step"] for entry in metrics(fleet, "long")]
    assert steps == list(range(1, len(steps) + 1)), "a resumed run repeats or loses no step"
    assert steps[-1] >= stopped["step"]


@pytest.fixture
def gpu_stand_in(fleet: Fleet) -> Iterator[None]:
    """The worker finds a GPU when it is one of several ranks. No lab host has one: see the file planted."""
    planted = "/etc/python3.11/sitecustomize.py"
    fleet.on(HOSTS[1], f"cp {planted} /root/sitecustomize.before")
    text = base64.b64encode((ROOT / "tests" / "gpu_stand_in" / "sitecustomize.py").read_bytes()).decode()
    fleet.on(HOSTS[1], f"echo {text} | base64 -d > {planted}")
    yield
    fleet.on(HOSTS[1], f"mv /root/sitecustomize.before {planted}")


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_stand_in")
def test_a_run_is_left_to_the_host_whose_gpu_is_faster_alone(fleet: Fleet) -> None:
    settings = {"run_id": "left", "steps": 4000, "eval_every": 0, "sync": "auto", "nproc_per_node": 2, **TINY}
    printed = fleet.play("train.yml", **settings).stdout
    assert "predicted, s a step (tok/s)" in printed, "the table by which it was decided"
    assert f"The run left is transferred to {HOSTS[1]}; {HOSTS[0]} is free." in " ".join(printed.split())
    status = fleet.play("status.yml", run_id="left").stdout
    assert re.search(rf"{HOSTS[0]} +not needed ", status), status
    assert fleet.on(HOSTS[0], "pgrep -u nanofleet -fc 'trainer [t]rain' || true") == "0"
    assert fleet.on(HOSTS[0], f"ls {RUN}").split() == ["e2e", "long", "smoke"], "nothing is left there"
    again = fleet.play("train.yml", **settings)
    assert (again.changed(), "transferred it to that host" in " ".join(again.stdout.split())) == (0, True)
    run_file = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/left/run.json"))
    assert (run_file["hosts"], run_file["chosen_from"]) == ([HOSTS[1]], list(HOSTS))
    facts = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/left/facts.json"))
    assert float(facts["tags"]["predicted.step_seconds"]) > 0, "measured once more where it trains"
    assert (facts["tags"]["hosts"], facts["tags"]["world_size"]) == (HOSTS[1], "1")
    fleet.play("stop.yml", run_id="left")
    stopped = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/left/outcome.json"))
    assert (stopped["outcome"], stopped["step"] > 0) == ("stopped", True), stopped
    resumed = " ".join(fleet.play("train.yml", run_id="left").stdout.split())
    assert f"Resuming the run left on {HOSTS[1]} only (chosen by sync=auto)" in resumed
    assert f"checkpoint of step {stopped['step']:,}" in resumed
    fleet.play("stop.yml", run_id="left", stop_now=True)


def test_hosts_that_boot_return_to_their_run(fleet: Fleet) -> None:
    """Both lose power, and nobody types anything; then the run is stopped, and does not return."""
    fleet.play("train.yml", run_id="boots", steps=4000, eval_every=0, save_every=5, **TINY)
    containers = {**os.environ, "CONTAINERS_CONF": str(ROOT / ".lab" / LAB / "containers.conf")}

    def power(*words: str) -> None:
        subprocess.run(["podman", *words, *HOSTS], check=True, env=containers, capture_output=True)

    def booted() -> bool:
        ping = ["ansible", "fleet", "-i", str(fleet.inventory), "-m", "ping"]
        done = subprocess.run(ping, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True)
        return done.returncode == 0

    def wait(what: Callable[[], bool], seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end
            time.sleep(2)

    for host in HOSTS:
        entry = fleet.on(host, "stat -c '%U %a' /etc/nanofleet/boots.sh")
        entry += " " + fleet.on(host, "systemctl is-enabled nanofleet@boots")
        assert entry.split() == ["root", "700", "enabled"]
    wait(lambda: len(metrics(fleet, "boots")) > 6)
    power("kill")
    power("start")
    wait(booted)
    before = len(metrics(fleet, "boots"))
    wait(lambda: len(metrics(fleet, "boots")) > before + 2)
    fleet.play("stop.yml", run_id="boots")
    for host in HOSTS:
        left = "ls -d /etc/nanofleet /etc/systemd/system/nanofleet@* 2>/dev/null || true"
        assert fleet.on(host, left) == ""
        assert fleet.on(host, "ls /etc/systemd/system | grep boots || true") == ""
    fleet.on(HOSTS[0], f"rm -r {RUN}/boots")


def test_misspelt_and_wrong_knobs_get_a_sentence(fleet: Fleet) -> None:
    assert "Did you mean depth?" in fleet.play("train.yml", fails=True, dept=2).stdout
    wrong = fleet.play("train.yml", fails=True, depth="deep").stdout
    assert "deep" in wrong
    assert "Traceback" not in wrong


def test_data_that_the_hosts_do_not_hold_are_refused(fleet: Fleet, dataset: Path, tmp_path: Path) -> None:
    assert "is not a dataset" in fleet.play("train.yml", fails=True, data_dir=tmp_path, **TINY).stdout
    manifest = (dataset / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(manifest + "\n")
    printed = fleet.play("train.yml", fails=True, run_id="other", data_dir=tmp_path, **TINY).stdout
    for host in HOSTS:
        assert f"The training data of {host} are not those of {tmp_path}" in " ".join(printed.split())
    assert fleet.on(HOSTS[0], f"ls {RUN}").split() == ["e2e", "long", "smoke"]


def test_a_run_is_fine_tuned_on_conversations(fleet: Fleet, dataset: Path, tmp_path: Path) -> None:
    """An epoch from the newest checkpoint of a run, with the settings of that run."""
    chats = tmp_path / "chats.jsonl"
    ask, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Nothing at all."}
    chats.write_text(f"{json.dumps([ask, answer])}\n" * 400)
    asked = {"stage": "sft", "from_run": "e2e", "run_id": "chat", "data_dir": dataset, "eval_tokens": 1024}
    fleet.play("train.yml", conversations=f"{chats}=3", **asked)
    fleet.play("playbooks/watch.yml", run_id="chat")
    steps = metrics(fleet, "chat")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    config = json.loads(fleet.on(HOSTS[1], f"cat {RUN}/chat/run.json"))["config"]
    assert (config["depth"], config["sequence_len"], config["stage"]) == (2, 128, "sft")
    assert config["parent"].startswith("e2e/step_000030/")
    outcome = json.loads(fleet.on(HOSTS[0], f"cat {RUN}/chat/outcome.json"))
    assert (outcome["outcome"], outcome["step"]) == ("finished", steps[-1]["step"]), outcome
    again = fleet.play("train.yml", conversations=f"{chats}=3", **asked)
    assert (again.changed(), "The run chat has finished" in " ".join(again.stdout.split())) == (0, True)
    fleet.on(HOSTS[0], f"rm -r {RUN}/chat")
    fleet.on(HOSTS[1], f"rm -r {RUN}/chat")

    chats.write_text(chats.read_text() + "[]\n")
    refused = " ".join(fleet.play("train.yml", fails=True, conversations=chats, **asked).stdout.split())
    assert (
        f"NF616: The files of conversations cannot be used for fine-tuning. conversations: {chats}:401: "
        in refused
    )


def test_a_host_that_is_down_is_named(fleet: Fleet, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    text = fleet.inventory.read_text()
    assert HOSTS[1] in text
    # An address of the lab's own subnet where nobody answers.
    address = re.findall(r"ansible_host: [\"']?([0-9.]+)", text)[1]
    inventory.write_text(text.replace(address, address.rsplit(".", 1)[0] + ".250"))
    printed = (
        Fleet(fleet.workdir, inventory).play("train.yml", fails=True, run_id="down", steps=5, **TINY).stdout
    )
    assert re.search(rf"^ *NF101 +{HOSTS[1]} +SSH cannot reach this host at ", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


def test_a_host_whose_key_has_changed_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.inventory is not None
    text = fleet.inventory.read_text()
    (known,) = set(re.findall(r'UserKnownHostsFile="([^"]+)"', text))
    lines = [line.split(" ", 1) for line in Path(known).read_text().splitlines()]
    swapped = [f"{line[0]} {other[1]}" for line, other in zip(lines, reversed(lines), strict=True)]
    (tmp_path / "known_hosts").write_text("\n".join(swapped) + "\n")
    # A connection that is kept from before would not be asked for its key again.
    new_connections = "  vars:\n    ansible_ssh_args: -o ControlMaster=no -o ControlPath=none\n"
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        text.replace(known, str(tmp_path / "known_hosts")).replace("  vars:\n", new_connections)
    )
    printed = Fleet(fleet.workdir, inventory).play("train.yml", fails=True, run_id="key", **TINY).stdout
    assert " ".join(printed.split()).count("the controller does not know the host's SSH key") >= len(HOSTS), (
        printed
    )
