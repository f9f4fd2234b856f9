"""A model is served from a host, moves to another one, and leaves nothing behind."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .lab import LAB, Fleet

pytestmark = pytest.mark.lab

TINY = {
    "depth": 2, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 2, "eval_tokens": 2048, "eval_every": 0, "tracker": "none",
}  # fmt: skip
HOSTS = (f"{LAB}-1", f"{LAB}-2")
UNIT = "nanofleet-serve.service"


def address(fleet: Fleet, host: str) -> str:
    return fleet.on(host, "hostname -I").split()[0]


def asked(url: str, key: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_a_run_answers_the_controller_alone(fleet: Fleet, dataset: Path) -> None:
    fleet.play("setup.yml", data_dir=dataset)
    refused = fleet.play("serve.yml", fails=True, serve_host="nowhere").stdout
    assert "NF440: serve_host is nowhere" in " ".join(refused.split())
    fleet.play("train.yml", run_id="served", steps=6, **TINY)
    fleet.play("playbooks/watch.yml", run_id="served")
    fleet.play("serve.yml", run_id="served", follow=True)
    url = f"http://{address(fleet, HOSTS[0])}:8000"
    assert asked(url)["model"] == "served"
    assert fleet.play("serve.yml", run_id="served", follow=True).changed() == 0
    tries = f'connect_ex(("{address(fleet, HOSTS[0])}", 8000))'
    peer = f"python3 -c 'import socket; s = socket.socket(); s.settimeout(3); print(s.{tries})'"
    assert fleet.on(HOSTS[1], peer) != "0", "a peer is neither the controller nor in serve_from"
    assert fleet.on(HOSTS[0], peer) == "0", "the host itself connects"


def health(fleet: Fleet) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{address(fleet, HOSTS[0])}:8000/health", timeout=10) as answer:
        return dict(json.load(answer))


def test_a_new_checkpoint_of_the_run_is_followed(fleet: Fleet) -> None:
    assert health(fleet)["step"] == 6
    fleet.play("train.yml", run_id="served", steps=9, **TINY)
    fleet.play("playbooks/watch.yml", run_id="served")
    deadline = time.monotonic() + 60
    while health(fleet)["step"] != 9 and time.monotonic() < deadline:
        time.sleep(1)
    assert health(fleet)["step"] == 9


def test_a_fine_tuned_run_takes_its_place(fleet: Fleet, dataset: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    ask, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Nothing at all."}
    chats.write_text(f"{json.dumps([ask, answer])}\n" * 100)
    tuning = {"stage": "sft", "from_run": "served", "conversations": chats, "data_dir": dataset, "steps": 4}
    fleet.play("train.yml", run_id="tuned", **tuning)
    fleet.play("playbooks/watch.yml", run_id="tuned")
    fleet.play("serve.yml", run_id="tuned")
    found = health(fleet)
    assert (found["run_id"], found["step"], found["fine_tuned"], found["notice"]) == ("tuned", 4, True, "")
    assert asked(f"http://{address(fleet, HOSTS[0])}:8000")["choices"]
    fleet.play("serve.yml", run_id="served")


def test_a_port_that_is_held_is_refused_by_its_holder(fleet: Fleet) -> None:
    refused = fleet.play("serve.yml", fails=True, run_id="served", serve_port=22).stdout
    assert "NF444: Port 22 of" in " ".join(refused.split())


def test_it_moves_to_another_host_with_a_key(fleet: Fleet) -> None:
    fleet.play("serve.yml", run_id="served", serve_host=HOSTS[1], serve_api_key="secret")
    assert fleet.on(HOSTS[0], f"systemctl is-active {UNIT} || true") == "inactive"
    url = f"http://{address(fleet, HOSTS[1])}:8000"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        asked(url)
    assert asked(url, "secret")["model"] == "served"


def test_stopped_it_leaves_nothing(fleet: Fleet) -> None:
    fleet.play("serve.yml", serve_state="stopped")
    for host in HOSTS:
        left = "ls /etc/systemd/system /opt/nanofleet /var/lib/nanofleet; ufw show added"
        assert "serve" not in fleet.on(host, left)
    assert fleet.play("serve.yml", serve_state="stopped").changed() == 0
