"""Checkpoints are whole or absent, damage is named, and every end has an outcome."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RATES, TINY

from trainer.checkpoint import compatibility, storage
from trainer.checkpoint.storage import DamagedCheckpointError, State
from trainer.config import ConfigError, RunConfig
from trainer.data import DataError
from trainer.data.files import write_whole
from trainer.health.attempt import Attempt
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.outcome import Final, Retryable, Stopped, conclude, is_expected

CONFIG = RunConfig.from_strings(TINY)
MODEL = GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16)


def state_at(step: int) -> State:
    torch.manual_seed(step)
    model = GPT(MODEL)
    model.init_weights()
    optimizer = build_optimizer(model, **RATES)
    model(torch.randint(300, (1, 8)), torch.randint(300, (1, 8))).backward()
    optimizer.step()
    meta = {"step": step, "config": CONFIG.to_dict(), "model_config": MODEL.__dict__, "hashes": {"rows": "r"}}
    return State(meta, dict(model.state_dict()), optimizer.state_dict())


def printed_by(lines: list[str]) -> str:
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path: Path, data_dir: Path) -> Path:
    """Checkpoints of steps 20 and 30; step 10's has been dropped."""
    for step in (10, 20, 30):
        storage.save(tmp_path / "checkpoints", state_at(step), data_dir / "tokenizer")
    return tmp_path / "checkpoints"


def test_the_newest_two_are_kept_and_come_back_bitwise(folder: Path) -> None:
    assert [path.name for path in storage.checkpoints(folder)] == ["step_000030", "step_000020"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000020", "step_000030"]
    state = storage.newest(folder, lambda text: pytest.fail(text))
    assert state is not None
    expected = state_at(30)
    assert state.step == 30
    assert state.model.keys() == expected.model.keys()
    assert all(torch.equal(state.model[name], tensor) for name, tensor in expected.model.items())
    for name, tensors in expected.optim.items():
        assert all(torch.equal(state.optim[name][key], tensor) for key, tensor in tensors.items()), name
    model, tokenizer = storage.load_model(folder / "step_000030")
    assert model.config == MODEL
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize("file", ["model.safetensors", "optim.pt", "tokenizer/tokenizer.json", "meta.json"])
def test_a_damaged_one_is_named_and_the_one_before_taken(folder: Path, file: str) -> None:
    path = folder / "step_000030" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if file != "meta.json" else data[: len(data) // 2])
    printed: list[str] = []
    state = storage.newest(folder, printed.append)
    assert state is not None
    assert state.step == 20
    assert len(printed) == 1
    assert str(path) in printed[0]
    assert sorted(path.name for path in folder.iterdir()) == ["damaged_step_000030", "step_000020"]


def test_none_whole_is_refused_and_none_at_all_is_a_start(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*/model.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"All 2 checkpoint\(s\) in .* are damaged"):
        storage.newest(folder, lambda text: None)
    assert storage.newest(tmp_path / "none", lambda text: None) is None


def test_a_file_is_on_the_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure after the rename must not leave an empty file: the bytes are out of Python's buffer."""
    synced: list[int] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_whole(tmp_path / "small", b"x" * 100)
    assert synced[0] == 100


def test_an_interrupted_save_leaves_the_old_ones(
    folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_whole", full_disk)
        with pytest.raises(OSError, match="No space"):
            storage.save(folder, state_at(40), data_dir / "tokenizer")
    assert sorted(path.name for path in folder.iterdir()) == ["step_000020", "step_000030"]
    (folder / ".step_000050.tmp").mkdir()  # as SIGKILL leaves it
    copy = folder / ".step_000060.copy"  # being received by another thread
    copy.mkdir()
    storage.save(folder, state_at(40), data_dir / "tokenizer")
    assert sorted(path.name for path in folder.iterdir()) == [copy.name, "step_000030", "step_000040"]
    storage.remove_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000030", "step_000040"]


def test_a_full_disk_is_reported_in_its_own_words() -> None:
    """torch wraps the error of a write in one about its own positions."""

    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as caught:
        storage.save_tensors({"x": torch.ones(1000)}, Full())
    assert caught.value.errno == errno.ENOSPC


def test_an_error_of_the_disk_in_safetensors_is_one_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        storage.save_safetensors({"x": torch.ones(1000)}, tmp_path / "none" / "model.safetensors")
    limited = """
import resource, signal, sys, torch
from pathlib import Path
from trainer.checkpoint import compatibility, storage
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))
storage.save_safetensors({'x': torch.ones(1000)}, Path(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path / "model.safetensors")],
        capture_output=True,
        text=True,
    )
    assert "OSError: [Errno 27] File too large" in done.stderr


def test_the_model_can_be_used_though_the_optimizers_state_is_damaged(folder: Path) -> None:
    (folder / "step_000030" / "optim.pt").write_bytes(b"damaged")
    assert storage.load_model(folder / "step_000030")[0].config == MODEL
    with pytest.raises(ConfigError, match=r"contains some: use .*step_000030\.$"):
        storage.load_model(folder.parent)


def test_pickles_are_not_loaded(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("loaded",))

    for name in ("model.safetensors", "optim.pt"):
        path = folder / "step_000030" / name
        sound = path.read_bytes()
        torch.save({"x": Evil()}, path)
        meta = json.loads((path.parent / "meta.json").read_text())
        meta["sha256"][name] = storage.file_sha256(path)
        (path.parent / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(DamagedCheckpointError, match=rf"{name} cannot be read"):
            storage.load(path.parent)
        path.write_bytes(sound)
        meta["sha256"][name] = storage.file_sha256(path)
        (path.parent / "meta.json").write_text(json.dumps(meta))


def test_another_configuration_or_other_data_is_refused_by_name(folder: Path) -> None:
    state = storage.load(folder / "step_000030")
    compatibility.check_continues(state, CONFIG, {"rows": "r"}, "run")
    other = RunConfig.from_strings({**TINY, "seed": 43, "tracker": "mlflow"})
    with pytest.raises(ConfigError, match=r"configuration: seed was 42, now 43\. Give"):
        compatibility.check_continues(state, other, {"rows": "r"}, "run")
    with pytest.raises(DataError, match=r"other data \(rows\)"):
        compatibility.check_continues(state, CONFIG, {"rows": "s"}, "run")


def test_every_end_has_an_outcome_and_a_sentence(tmp_path: Path) -> None:
    assert conclude(Stopped("asked")) == ("stopped", "asked", 0)
    assert conclude(Retryable("gone")) == ("retryable", "gone", 75)
    assert conclude(Final("nan")) == ("final", "nan", 1)
    assert conclude(ConfigError("depth")) == ("final", "depth", 2)
    assert conclude(OSError(28, "No space", "/runs"))[1].startswith("No space is left on the disk of /runs.")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    assert "is too small for this run" in conclude(refused.value)[1]
    with pytest.raises(KeyError) as caught:
        {}["x"]
    outcome, reason, code = conclude(caught.value)
    assert (outcome, code, is_expected(caught.value)) == ("final", 1, False)
    assert "Unexpected KeyError in test_checkpoint.py" in reason

    attempt = Attempt(tmp_path / "run", RankEnv(rank=1, world_size=2))
    attempt.begin()
    attempt.update(step=3, loss=1.5)
    assert attempt.end("retryable", "Lost rank 0.")
    assert not attempt.end("stopped", "too late")
    outcome_file = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert (outcome_file["outcome"], outcome_file["step"], outcome_file["rank"]) == ("retryable", 3, 1)
