"""Checkpoints and run files of other releases: resumed, migrated, or refused by name; never called damage."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import free_port, losses

from trainer.checkpoint import storage
from trainer.checkpoint.rank_state import load_rank_state
from trainer.checkpoint.storage import DamagedCheckpointError
from trainer.config import (
    IDENTITY,
    SCHEMA,
    ConfigError,
    NewerSchemaError,
    RunConfig,
    RunFile,
    migrate,
    setting,
)
from trainer.health.attempt import Attempt
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final

SCHEMA_1 = Path(__file__).parents[1] / "fixtures" / "checkpoints" / "schema1"
SCHEMA_2 = SCHEMA_1.with_name("schema2")
EXPECTED = json.loads((SCHEMA_1 / "expected.json").read_text())
TOLERANCE = 2e-4  # other processors and versions of torch add in another order


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SCHEMA_1 / "data", tmp_path / "data"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The dense run, after step 4 of 8."""
    return Path(shutil.copytree(SCHEMA_1 / "dense", tmp_path / "dense"))


def step_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_000004"


def change_meta(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = step_dir(run_dir) / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def resume(data: Path, run_dir: Path, **changes: Any) -> tuple[Attempt, list[str]]:
    """Resume the dense run in this process; returns its attempt and its output."""
    from trainer.train import Trainer

    saved = json.loads((SCHEMA_1 / "dense" / "run.json").read_text())
    run_file = RunFile("dense", RunConfig.resumed(saved["config"], changes), ("host-1",))
    env, printed = RankEnv(host="host-1"), []

    log = RunLogger(env)
    log.addFilter(lambda record: printed.append(record.getMessage()) or True)
    attempt = Attempt(run_dir, env)
    attempt.begin()
    try:
        attempt.end("finished", Trainer(run_file, data, run_dir, env, attempt, log).run())
    finally:
        torch.set_flush_denormal(False)  # it belongs to the thread, and the other tests run in it too
    return attempt, printed


# -- checkpoints of older releases -------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SCHEMA_1, SCHEMA_2], ids=["1", "2"])
def test_a_dense_run_of_an_older_schema_resumes(data: Path, tmp_path: Path, schema: Path) -> None:
    run_dir = Path(shutil.copytree(schema / "dense", tmp_path / "dense"))
    _, printed = resume(data, run_dir)
    assert "Resuming from the checkpoint of step 4." in printed
    assert losses(run_dir) == pytest.approx(EXPECTED["dense"]["losses"], rel=TOLERANCE)
    assert json.loads((run_dir / "outcome.json").read_text())["val_bpb"] == pytest.approx(
        EXPECTED["dense"]["val_bpb"], rel=TOLERANCE
    )
    assert (run_dir / "checkpoints" / "step_000008" / "model.safetensors").exists()


@pytest.mark.processes
def test_a_local_run_of_schema_1_resumes_with_each_ranks_own_state(data: Path, tmp_path: Path) -> None:
    run = json.loads((SCHEMA_1 / "local" / "run.json").read_text())
    run["trainer_digest"] = ""  # train.yml renders it again with that of the release
    (tmp_path / "run.json").write_text(json.dumps(run))
    port, ranks = str(free_port()), []
    for rank in (0, 1):
        folder = shutil.copytree(SCHEMA_1 / "local" / f"rank{rank}", tmp_path / f"rank{rank}")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "GLOO_SOCKET_IFNAME": "lo",
            "NANOFLEET_HOST": f"host-{rank + 1}",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-m", "trainer", "train", "--data-dir", str(data)]
        command += ["--run-dir", str(folder), "--run-file", str(tmp_path / "run.json")]
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for process in ranks:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        assert "Resuming from the checkpoint of step 4." in printed
        assert "has no state of rank" not in printed
    assert losses(tmp_path / "rank0") == pytest.approx(EXPECTED["local"]["losses"], rel=TOLERANCE)


def test_settings_that_came_and_went(data: Path, run_dir: Path) -> None:
    """One that is missing takes its default, one that is gone is dropped with a note: the losses stay."""

    def change(meta: dict[str, Any]) -> None:
        del (
            meta["config"]["local_delay"],
            meta["config"]["digest_every"],
            meta["model_config"]["window_pattern"],
        )
        meta["config"]["flux"] = 3
        meta["model_config"]["rope"] = True

    change_meta(run_dir, change)
    _, printed = resume(data, run_dir)
    notes = [text for text in printed if "no longer has" in text]
    assert len(notes) == 1
    assert notes[0].endswith("they are ignored: flux (3), rope (True).")
    assert str(step_dir(run_dir)) in notes[0]
    assert losses(run_dir) == pytest.approx(EXPECTED["dense"]["losses"], rel=TOLERANCE)


def test_a_missing_value_is_the_one_of_before() -> None:
    @dataclasses.dataclass
    class Settings:
        old: int = setting(1, "was always there")
        new: str = setting("better", "came later, and changed what a run does", before="as ever")
        other: str = setting("plain", "came later, and its default changes nothing")

    values, unknown = migrate(Settings, {"old": 3, "gone": 1})
    assert Settings(**values) == Settings(3, "as ever", "plain")
    assert unknown == ["gone"]
    assert migrate(Settings, {"new": "x"})[0] == {"new": "x"}


def test_a_run_file_of_schema_1_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    today = RunFile.load(SCHEMA_1 / "local" / "run.json")
    assert (today.run_id, today.hosts, today.shares) == ("local", ("host-1", "host-2"), (3, 1))
    assert (today.config.sync, today.config.local_steps, today.config.embedding_lr) == ("local", 3, 10.0)
    raw = json.loads((SCHEMA_1 / "local" / "run.json").read_text())
    del raw["config"]["local_delay"]
    raw["config"]["flux"] = 3
    path = tmp_path / "run.json"
    path.write_text(json.dumps(raw))
    assert RunFile.load(path) == today
    assert "they are ignored: flux (3)" in capfd.readouterr().err


# -- of newer ones -----------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_newer_release_is_refused_by_name_and_left(data: Path, run_dir: Path) -> None:
    """Whatever else it has: its schema is read first. An older one beside it is not taken in its place."""
    older = shutil.copytree(step_dir(run_dir), run_dir / "checkpoints" / "step_000003")
    (step_dir(run_dir) / "meta.json").write_text(json.dumps({"schema": SCHEMA + 1, "settings": []}))
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    schemas = rf"\(schema {SCHEMA + 1}; this one reads up to {SCHEMA}\)"
    with pytest.raises(Final, match=f"step_000004 was written by a newer nanofleet {schemas}") as caught:
        resume(data, run_dir)
    assert "setup.yml" in str(caught.value)
    assert "damaged" not in str(caught.value)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before
    with pytest.raises(NewerSchemaError):
        storage.load_model(step_dir(run_dir))
    assert storage.load(older).step == 4


def test_a_run_file_of_a_newer_release_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "run": {}}))
    with pytest.raises(NewerSchemaError, match=r"run\.json was written by a newer nanofleet"):
        RunFile.load(path)


def test_values_that_a_release_refuses_are_no_damage(run_dir: Path) -> None:
    change_meta(run_dir, lambda meta: meta["config"].update(sync="turbo"))
    with pytest.raises(ConfigError, match=r"meta\.json are not valid .*: sync is 'turbo'") as caught:
        storage.newest(run_dir / "checkpoints", lambda text: None)
    assert not isinstance(caught.value, DamagedCheckpointError)
    change_meta(run_dir, lambda meta: meta["config"].update(sync="dense"))
    change_meta(run_dir, lambda meta: meta["model_config"].update(n_head=5))
    with pytest.raises(ConfigError, match="does not make 5 heads") as caught:
        storage.newest(run_dir / "checkpoints", lambda text: None)
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("schema", ["", None, "two"])
def test_a_schema_that_is_none_is_damage(run_dir: Path, schema: object) -> None:
    change_meta(run_dir, lambda meta: meta.update(schema=schema))
    with pytest.raises(DamagedCheckpointError, match=r"meta\.json is damaged"):
        storage.load(step_dir(run_dir))


def test_a_new_setting_of_the_identity_raises_the_schema() -> None:
    """An older release would drop it, and train differently without a message.

    When this fails: increase SCHEMA, if the last release has it, and change the digest here.
    """
    names = " ".join(sorted(RunConfig.field_names(IDENTITY)))
    assert (SCHEMA, hashlib.sha256(names.encode()).hexdigest()[:8]) == (5, "911ac5e6")


# -- what is no damage either ------------------------------------------------------------------------------

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(ALLOCATOR),
        RuntimeError("unable to mmap 4 bytes from file <model.pt>: Cannot allocate memory (12)"),
        torch.OutOfMemoryError("CUDA out of memory."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_reported_and_the_checkpoint_left(
    run_dir: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(step_dir(run_dir), run_dir / "checkpoints" / "step_000003")

    def fail(*_: object, **__: object) -> None:
        raise error

    own = SCHEMA_1 / "local" / "rank1"
    meta = json.loads((SCHEMA_1 / "local/rank0/checkpoints/step_000004/meta.json").read_text())
    assert load_rank_state(own, meta, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        for load in (
            lambda: storage.newest(run_dir / "checkpoints", lambda text: pytest.fail(text)),
            lambda: storage.load_model(step_dir(run_dir)),
            lambda: load_rank_state(own, meta, 1),
        ):
            with pytest.raises(ConfigError, match=r"too little memory to load .*\.pt") as caught:
                load()
            assert not isinstance(caught.value, DamagedCheckpointError)
    with monkeypatch.context() as patch:
        patch.setattr(storage.GPT, "load_state_dict", fail)
        with pytest.raises(ConfigError, match=r"too little memory to load .*model\.pt"):
            storage.load_model(step_dir(run_dir))
    assert len(storage.checkpoints(run_dir / "checkpoints")) == 2


def test_a_file_that_may_not_be_read_is_no_damage(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(storage, "file_sha256", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot be read: Permission denied\. The file is unchanged: check its"
    ) as caught:
        storage.newest(run_dir / "checkpoints", lambda text: None)
    assert not isinstance(caught.value, DamagedCheckpointError)
