"""The secret of the fleet: kept or made on the coordinator, the same on all hosts, open to nobody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import secret_file
from ansible_collections.nanofleet.fleet.plugins.module_utils.host_accounts import group_name
from ansible_collections.nanofleet.fleet.plugins.modules import fleet_secret
from role_files import ROOT, call

SECRET = "5e" * 32
GROUP = group_name(os.getgid())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "opt" / "fleet.secret"


def run(monkeypatch: pytest.MonkeyPatch, path: Path, check: bool = False, **given: Any) -> dict[str, Any]:
    return call(fleet_secret, monkeypatch, check, path=str(path), **given)


@pytest.mark.parametrize(("group", "mode"), [("", 0o600), (GROUP, 0o640)])
def test_a_secret_is_made_once(path: Path, monkeypatch: pytest.MonkeyPatch, group: str, mode: int) -> None:
    planned = run(monkeypatch, path, check=True, group=group)
    assert (planned["changed"], path.exists()) == (True, False)
    made = run(monkeypatch, path, group=group)
    assert made["changed"]
    assert secret_file.PATTERN.fullmatch(made["secret"])
    assert path.read_text() == made["secret"] + "\n"
    assert path.stat().st_mode & 0o777 == mode
    for check in (False, True):
        again = run(monkeypatch, path, check, group=group)
        assert (again["changed"], again["secret"]) == (False, made["secret"])
    assert [each.name for each in path.parent.iterdir()] == ["fleet.secret"]


def test_a_host_gets_the_secret_of_the_coordinator(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, path)
    assert run(monkeypatch, path, secret=SECRET)["changed"]
    assert secret_file.read_secret(str(path)) == SECRET
    assert not run(monkeypatch, path, secret=SECRET)["changed"]


def test_what_others_may_read_or_is_no_secret_is_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, path, secret=SECRET)
    assert secret_file.differences(str(path), "") == []
    path.chmod(0o644)
    [phrase] = secret_file.differences(str(path), "")
    assert SECRET not in phrase
    assert run(monkeypatch, path)["secret"] == SECRET
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("cut")
    assert secret_file.differences(str(path), "")
    assert run(monkeypatch, path)["secret"] != "cut"
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
    assert secret_file.differences(str(path), "")


def test_hosts_are_compared_by_a_digest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_file.digest(str(path)) == ""
    run(monkeypatch, path, secret=SECRET)
    found = secret_file.digest(str(path))
    assert found
    assert found != SECRET
    assert secret_file.phrases({"tower": found, "laptop": found}, "tower") == []
    [phrase] = secret_file.phrases({"tower": found, "laptop": "0"}, "tower")
    assert phrase.startswith("laptop: ")


def test_the_tasks_print_nothing_of_the_secret() -> None:
    tasks = yaml.safe_load((ROOT / "roles" / "runtime" / "tasks" / "secret.yml").read_text())
    assert [task["no_log"] for task in tasks] == [True, True]
