"""The tracker's login: asked for, given to rank 0, in no command line, journal or file that others read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .three import TINY, Three

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PASSWORD = "correct-horse-battery"
LOGIN = {"tracker_auth": True, "tracker_password": PASSWORD}


def status(three: Three, password: str = "") -> int:
    """What the tracker answers to a listing of experiments, asked by a host of the fleet."""
    code = f"""
import base64, urllib.request, urllib.error
experiments = "http://{three.addresses[0]}:5000/api/2.0/mlflow/experiments/get?experiment_id=0"
asked = urllib.request.Request(experiments)
if {password!r}:
    login = base64.b64encode(b"nanofleet:" + {password.encode()!r}).decode()
    asked.add_header("Authorization", "Basic " + login)
try:
    print(urllib.request.urlopen(asked, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    argv = ["podman", "exec", "-i", three.name(2), "python3", "-"]
    return int(subprocess.run(argv, input=code, capture_output=True, text=True, check=True).stdout)


def test_a_login_without_a_proper_password_is_refused(three: Three, dataset: Path) -> None:
    for password in ("", "short", 'with "quotes" in it'):
        words = three.home.play(
            "setup.yml",
            fails=True,
            data_dir=dataset,
            tracker_auth=True,
            tracker_password=json.dumps(password)[1:-1],
        ).stdout
        assert "ansible-vault encrypt_string --prompt --name tracker_password" in " ".join(words.split())
        assert not password or password not in words


def test_ranks_log_in_and_nobody_sees_the_password(three: Three, dataset: Path) -> None:
    printed = three.home.play("setup.yml", data_dir=dataset, **LOGIN).stdout
    assert three.home.play("setup.yml", data_dir=dataset, **LOGIN).changed() == 0
    assert (status(three), status(three, "wrong-horse-battery"), status(three, PASSWORD)) == (401, 401, 200)
    run = {**TINY, "run_id": "login", "steps": 60}
    printed += three.home.play("train.yml", **LOGIN, **run).stdout
    arguments = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    assert PASSWORD not in three.inside(1, arguments)
    printed += three.home.play("playbooks/watch.yml", run_id="login").stdout
    log = three.inside(1, "cat /var/lib/nanofleet/runs/login/train.log")
    assert "Tracked at http://" in log
    journal = three.inside(1, "journalctl --no-pager --output=cat")
    for where, text in (("playbooks", printed), ("log", log), ("journal", journal)):
        assert PASSWORD not in text, where
    files = "/var/lib/nanofleet /etc $(find /opt/nanofleet -maxdepth 1 -type f)"
    found = three.inside(1, f"grep -rlF {PASSWORD} {files} || true").split()
    assert found == ["/var/lib/nanofleet/mlflow/login.env", "/opt/nanofleet/tracker-login.env"]
    modes = three.inside(1, f"stat -c '%a %U' {' '.join(found)}").splitlines()
    assert modes == ["600 root", "600 root"]


def test_another_password_replaces_it_and_without_a_login_all_is_as_before(
    three: Three, dataset: Path
) -> None:
    other = PASSWORD[::-1]
    three.home.play("setup.yml", data_dir=dataset, tracker_auth=True, tracker_password=other)
    assert (status(three, PASSWORD), status(three, other)) == (401, 200)
    three.home.play("setup.yml", data_dir=dataset)
    assert status(three) == 200
    assert three.inside(1, "ls /var/lib/nanofleet/mlflow | grep -c login || true") == "0"
