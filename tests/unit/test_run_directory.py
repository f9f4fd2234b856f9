"""Files of a run on a host: whose rights they are read and written with, and links in their place."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_dir as run_dir_facts
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_reading
from ansible_collections.nanofleet.fleet.plugins.module_utils import service_user as user_facts
from ansible_collections.nanofleet.fleet.plugins.modules import run_directory, run_files, run_state
from role_files import call
from run_states import ROOT

USER = "nobody"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user, which takes root")


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A folder that other users reach, with the folder of runs in it, which is the service user's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    runs = folder / "runs"
    runs.mkdir()
    if os.geteuid() == 0:
        entry = pwd.getpwnam(USER)
        os.chown(runs, entry.pw_uid, entry.pw_gid)
    yield folder
    shutil.rmtree(folder)


def make(monkeypatch: pytest.MonkeyPatch, run: Path, **params: Any) -> dict[str, Any]:
    user = USER if os.geteuid() == 0 else ""
    return call(run_directory, monkeypatch, path=str(run), user=user, **params)


def test_a_run_directory_is_open_to_its_group_alone(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = state_dir / "runs" / "a"
    first = make(monkeypatch, run, files={"run.json": "{}\n"})
    assert (first["changed"], first["changed_files"]) == (True, ["run.json"])
    modes = [path.stat().st_mode & 0o777 for path in (state_dir / "runs", run, run / "run.json")]
    assert modes == [0o750, 0o750, 0o640]
    assert not make(monkeypatch, run, files={"run.json": "{}\n"})["changed"]
    kept = make(monkeypatch, run, files={"run.json": "other"}, replace=False)
    assert (kept["changed"], (run / "run.json").read_text()) == (False, "{}\n")
    run.chmod(0o755)
    assert make(monkeypatch, run)["changed"]
    gone = make(monkeypatch, run, remove=["run.json", "stop"])
    assert (gone["changed_files"], os.listdir(run)) == (["run.json"], [])
    assert make(monkeypatch, run, state="absent")["changed"]
    assert not make(monkeypatch, run, state="absent")["changed"]


def test_check_mode_writes_nothing_and_shows_what_it_would(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = state_dir / "runs" / "a"
    would = make(monkeypatch, run, check=True, files={"run.json": "{}\n"})
    assert (would["changed"], would["diff"][0]["after"]) == (True, "{}\n")
    assert not run.exists()
    early = call(run_directory, monkeypatch, check=True, path=str(run), user="no-such-user", files={"a": "b"})
    assert (early["failed"], early["changed"]) == (False, True)


def test_a_link_in_the_place_of_a_file_is_replaced_and_its_target_left(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, secret = state_dir / "runs" / "a", state_dir / "secret"
    secret.write_text("secret")
    before = secret.stat()
    make(monkeypatch, run)
    (run / "stop").symlink_to(secret)
    (run / ".stop.new").symlink_to(secret)
    assert make(monkeypatch, run, files={"stop": ""})["changed"]
    assert not (run / "stop").is_symlink()
    after = secret.stat()
    assert (secret.read_text(), after.st_mode, after.st_uid) == ("secret", before.st_mode, before.st_uid)


@pytest.mark.parametrize("name", ["runs", "runs/a"])
def test_a_folder_that_is_a_link_is_refused_by_name(
    state_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = state_dir / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if name == "runs":
        (state_dir / "runs").rmdir()
    (state_dir / name).symlink_to(elsewhere)
    refused = make(monkeypatch, state_dir / "runs" / "a", files={"run.json": "{}"})
    assert refused["failed"]
    assert f"{state_dir / name} is a link to {elsewhere}" in refused["msg"]
    assert (elsewhere.stat().st_mode & 0o777, os.listdir(elsewhere)) == (0o700, [])
    make(monkeypatch, state_dir / "runs" / "a", state="absent")
    assert elsewhere.is_dir()


@needs_root
def test_root_works_with_the_rights_of_the_service_user(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, secret = state_dir / "runs" / "a", state_dir / "secret"
    secret.write_text('{"run_id": "secret"}')
    secret.chmod(0o600)
    make(monkeypatch, run, files={"run.json": "{}"})
    assert run.stat().st_uid == (run / "run.json").stat().st_uid == pwd.getpwnam(USER).pw_uid
    with user_facts.acting_as(USER):
        with pytest.raises(PermissionError):
            secret.read_text()
        assert os.listdir(run) == ["run.json"]
    assert (os.geteuid(), secret.read_text()[:1]) == (0, "{")
    with user_facts.acting_as("no-such-user"):
        assert os.geteuid() == 0


@needs_root
def test_what_root_reads_for_a_person_is_no_secret_of_root(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, secret = state_dir / "runs" / "a", state_dir / "secret"
    secret.write_text('{"secret": 1, "loss": 1}\n')
    secret.chmod(0o600)
    make(monkeypatch, run, files={"run.json": "{}"})
    for name in ("train.log", "outcome.json", "metrics.jsonl", "prediction.txt", "attempts.jsonl"):
        (run / name).symlink_to(secret)
    for name, value in (("known_units", {}), ("find_unit", unit())):
        monkeypatch.setattr(run_reading, name, lambda *_args, value=value: value)
    read = call(run_state, monkeypatch, state_dir=str(state_dir), run_id="a", user=USER)
    assert read["found"], read
    assert "secret" not in json.dumps({key: value for key, value in read.items() if key != "links"})
    assert read["links"] == {
        str(run / name): str(secret) for name in ("train.log", "metrics.jsonl", "attempts.jsonl")
    }
    listed = call(run_files, monkeypatch, path=str(run), user=USER)
    assert (
        listed["msg"]
        == f"The files of {run} cannot be listed: {run}/metrics.jsonl is a link; only real files are fetched."
    )


def unit() -> dict[str, Any]:
    return {
        "name": "nanofleet-a.service",
        "active_state": "inactive",
        "sub_state": "dead",
        "restarts": 0,
        "since": None,
    }


def test_only_real_files_of_a_checkpoint_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "model.pt").symlink_to(tmp_path / "secret")
    for names, printed in (
        (["model.pt"], "is a link"),
        (["../../secret"], "outside of"),
        (["/etc/passwd"], "outside of"),
    ):
        (folder / "meta.json").write_text(json.dumps({"sha256": dict.fromkeys(names, "0")}))
        listed = call(run_files, monkeypatch, path=str(tmp_path), checkpoint="checkpoints/step_000001")
        assert listed["failed"]
        assert printed in listed["msg"]


def test_only_names_that_a_run_can_have_are_runs_and_checkpoints(tmp_path: Path) -> None:
    for name in ("good", "$(touch x)", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert [run["run_id"] for run in run_dir_facts.known_runs(str(tmp_path), [])] == ["good"]
    for name in ("step_000001", "step_$(touch x)"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "meta.json").write_text("{}")
    assert run_dir_facts.newest_checkpoint(str(tmp_path))[0] == "checkpoints/step_000001"


# -- the roles' tasks ------------------------------------------------------------------------------------

STATE = re.compile(
    r"((launch|run_remove)_state_dir|run_state_dir|run_dir|runtime_home|tracker_dir|__tracker_stamp|runtime_keep|item\.key)\b"
)
WRITES = {f"ansible.builtin.{name}" for name in ("file", "copy", "template", "slurp", "fetch", "lineinfile")}


def tasks_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every task in a list of tasks and blocks."""
    for task in value or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks_of(task.get(part))


def test_root_follows_no_link_below_the_state_directory() -> None:
    """The service user can put links there. Removing a link, or a folder with links in it, follows none."""
    odd = []
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        for task in tasks_of(yaml.safe_load(path.read_text())):
            for module in WRITES & set(task):
                given = task[module]
                safe = given.get("follow") is False or given.get("state") == "absent"
                where = json.dumps([given, task.get("loop")])
                if STATE.search(where) and not safe and task.get("delegate_to") != "localhost":
                    odd.append(f"{path.relative_to(ROOT)}: {task['name']}")
    assert odd == []


def test_every_module_that_opens_files_of_a_run_knows_whose_rights_to_use() -> None:
    names = ("run_state", "run_log", "follow_log", "run_files", "run_directory", "end_run")
    opens, seen = {f"nanofleet.fleet.{name}" for name in names}, set()
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        for task in tasks_of(yaml.safe_load(path.read_text())):
            for module in opens & set(task):
                seen.add(module)
                if task.get("delegate_to") != "localhost":
                    user = task[module].get("user", "")
                    where = f"{path.relative_to(ROOT)}: {task['name']}"
                    assert re.fullmatch(r"\{\{ \w+_user \}\}", user), where
    assert seen == opens
