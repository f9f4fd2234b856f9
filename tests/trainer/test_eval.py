"""`eval` computes nanochat's CORE of a checkpoint on 1 to 3 ranks, continues, and refuses what differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, train_here
from core_bundles import golden_bundle, golden_model
from golden_chat import GOLDEN, byte_tokenizer

from trainer.__main__ import main
from trainer.checkpoint import storage
from trainer.checkpoint.storage import State
from trainer.config import RunConfig
from trainer.eval import core
from trainer.eval.results import Results

TASKS = {task["label"]: task for task in GOLDEN["core"]["tasks"]}
METRIC = GOLDEN["core"]["core_metric"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the golden model."""
    folder = tmp_path_factory.mktemp("golden")
    byte_tokenizer().save(folder / "tokenizer")
    meta = {"step": 7, "run_id": "golden", "config": RunConfig(sequence_len=256).to_dict()}
    meta["model_config"] = GOLDEN["config"]
    return storage.save(folder, State(meta, dict(golden_model().state_dict()), {}), folder / "tokenizer")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_bundle(tmp_path_factory.mktemp("bundle") / "core")


def evaluate(checkpoint: Path, *options: str | Path) -> int:
    given = ["--checkpoint", str(checkpoint), "--device", "cpu", *map(str, options)]
    return main(["eval", *given])


def result_of(out: Path, part: str = "core") -> Any:
    return json.loads((out / "eval.json").read_text())["parts"][part]


def refusal(capfd: pytest.CaptureFixture[str], checkpoint: Path, *options: str | Path) -> str:
    assert evaluate(checkpoint, *options) == 2
    return capfd.readouterr().err


def ranks(
    checkpoints: Sequence[Path], *options: str | Path, each: Sequence[Sequence[str | Path]] = ()
) -> list[tuple[int, str, str]]:
    """Run `eval` on ranks as torchrun would, one per checkpoint; code, output and errors of each.

    each: further options of each rank.
    """
    port, processes = str(free_port()), []
    for rank, checkpoint in enumerate(checkpoints):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NANOFLEET_HOST": f"host-{rank + 1}", "LOCAL_RANK": "0"}
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(checkpoints))}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [
            sys.executable,
            "-m",
            "trainer",
            "eval",
            "--checkpoint",
            str(checkpoint),
            "--device",
            "cpu",
        ]
        processes.append(
            subprocess.Popen(
                [*command, *map(str, [*options, *(each[rank] if each else ())])],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]


def test_the_core_metric_is_that_of_nanochat(
    checkpoint: Path, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(checkpoint, "--core", bundle, "--out", tmp_path / "out") == 0
    found = result_of(tmp_path / "out")
    assert found["core_metric"] == pytest.approx(METRIC, abs=1e-12)
    accuracies = {label: task["accuracy"] for label, task in found["tasks"].items()}
    assert accuracies == {label: task["accuracy"] for label, task in TASKS.items()}
    assert (tmp_path / "out" / "core.csv").read_text().splitlines()[-1].split() == [
        "CORE",
        ",",
        ",",
        "0.194569",
    ]
    assert "CORE metric 0.1946" in capfd.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_find_what_one_rank_finds(
    world_size: int, checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    printed = ranks([checkpoint] * world_size, "--core", bundle, "--out", tmp_path / "many")
    assert [code for code, *_ in printed] == [0] * world_size, printed
    assert evaluate(checkpoint, "--core", bundle, "--out", tmp_path / "one") == 0
    assert result_of(tmp_path / "many") == result_of(tmp_path / "one")


@pytest.mark.processes
def test_only_rank_0_needs_the_checkpoint(
    checkpoint: Path, bundle: Path, data_dir: Path, tmp_path: Path
) -> None:
    train_here(data_dir, tmp_path / "run", num_iterations=2)
    trained, nowhere = tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "none"
    given = ("--bpb", "--data-dir", data_dir, "--core", bundle, "--sample")
    printed = ranks([trained, nowhere], *given, "--out", tmp_path / "two")
    assert [code for code, *_ in printed] == [0, 0], printed
    assert evaluate(trained, *given, "--out", tmp_path / "one") == 0
    one, two = (json.loads((tmp_path / name / "eval.json").read_text())["parts"] for name in ("one", "two"))
    assert two["bpb"]["val_bpb"] == pytest.approx(one["bpb"]["val_bpb"], rel=1e-9)
    assert (two["core"], two["sample"]) == (one["core"], one["sample"])


@pytest.mark.processes
def test_a_problem_of_one_rank_ends_all(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    printed = ranks([tmp_path / "none", checkpoint], "--core", bundle)
    assert [code for code, *_ in printed] == [1, 1], printed
    assert all("rank 0 (host-1): There is no checkpoint directory" in errors for *_, errors in printed)


@pytest.mark.processes
def test_a_bundle_that_one_host_lacks_is_named(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    """The other host has another file in it, or none at all."""
    shutil.copytree(bundle, tmp_path / "core")
    other = next((tmp_path / "core" / "eval_data" / "some").iterdir())
    other.write_text(other.read_text() + other.read_text().splitlines()[0] + "\n")
    printed = ranks([checkpoint] * 2, "--core", bundle, each=[["--core", tmp_path / "core"], []])
    assert [code for code, *_ in printed] == [1, 1], printed
    assert all("CORE bundle is" in errors and "rank 1 (host-2) has" in errors for *_, errors in printed)
    printed = ranks([checkpoint] * 2, "--core", bundle, each=[[], ["--core", tmp_path / "no"]])
    assert [code for code, *_ in printed] == [1, 1], printed
    assert all("rank 1 (host-2): There is no CORE bundle" in errors for *_, errors in printed)


@pytest.mark.processes
def test_the_end_is_in_the_run_directory(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    printed = ranks([checkpoint], "--core", bundle, "--out", tmp_path / "out", "--run-dir", tmp_path)
    assert [code for code, *_ in printed] == [0], printed
    assert json.loads((tmp_path / "outcome.json").read_text())["outcome"] == "finished"
    printed = ranks([checkpoint], "--core", tmp_path / "no", "--run-dir", tmp_path)
    assert [code for code, *_ in printed] == [2], printed
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["settled"]) == ("final", True)
    assert outcome["reason"].startswith("There is no CORE bundle")


def test_finished_tasks_are_not_evaluated_again(
    checkpoint: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[str] = []
    sound = core._is_correct

    def fails_later(model: Any, task: Any, *rest: Any) -> bool:
        if task.label == "lm" and "lm" not in evaluated:
            evaluated.append(task.label)
            raise KeyboardInterrupt
        evaluated.append(task.label)
        return sound(model, task, *rest)

    monkeypatch.setattr(core, "_is_correct", fails_later)
    assert evaluate(checkpoint, "--core", bundle, "--out", tmp_path) == 130
    assert set(evaluated) == {"mc", "schema", "lm"}
    evaluated[:] = ["lm"]
    assert evaluate(checkpoint, "--core", bundle, "--out", tmp_path) == 0
    assert set(evaluated) == {"lm"}
    assert result_of(tmp_path)["core_metric"] == pytest.approx(METRIC, abs=1e-12)


def test_two_commands_at_once_keep_the_parts_of_both(tmp_path: Path) -> None:
    long, short = (Results(tmp_path, {"step": 1}) for _ in range(2))
    short.add("bpb", {"val_bpb": 1.0})
    long.add("sample", "text")
    assert Results(tmp_path, {"step": 1}).parts == {"bpb": {"val_bpb": 1.0}, "sample": "text"}
    long, short = (Results(tmp_path, {"step": 1}) for _ in range(2))
    short.add("bpb", {"val_bpb": 0.9})
    long.add("sample", "text")
    assert Results(tmp_path, {"step": 1}).parts["bpb"] == {"val_bpb": 0.9}, "the newer result stays"


def test_results_of_another_bundle_or_limit_are_not_mixed(
    checkpoint: Path, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(checkpoint, "--core", bundle, "--out", out, "--core-max-per-task", "4") == 0
    assert result_of(out)["tasks"]["mc"]["items"] == 4
    printed = refusal(capfd, checkpoint, "--core", bundle, "--out", out)
    assert "core.json has results for another value of --core-max-per-task. Give another --out" in printed
    content = json.loads((out / "core.json").read_text())
    (out / "core.json").write_text(json.dumps({**content, "bundle": "0"}))
    assert "results for another CORE bundle and value of --core-max-per-task" in refusal(
        capfd, checkpoint, "--core", bundle, "--out", out
    )
    (out / "core.json").write_text(json.dumps({**content, "max_per_task": 0, "tasks": {"mc": [5, 4]}}))
    assert "core.json is damaged" in refusal(capfd, checkpoint, "--core", bundle, "--out", out)
    (out / "core.json").write_text("{")
    assert "core.json is damaged" in refusal(capfd, checkpoint, "--core", bundle, "--out", out)
    content = json.loads((out / "eval.json").read_text())
    (out / "eval.json").write_text(json.dumps({**content, "checkpoint": {"step": 8}}))
    printed = refusal(capfd, checkpoint, "--core", bundle, "--out", out)
    assert "eval.json has results for another checkpoint" in printed


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--bpb"], "--bpb needs --data-dir"),
        (["--core-max-per-task", "-1"], "take whole numbers from 0"),
        (["--core-url", "http://a/b.zip"], "--core-url needs --core"),
        (["--core", "/nowhere"], "There is no CORE bundle /nowhere. Download a bundle to a new folder"),
        (["--core", "x", "--core-url", "http://a", "--core-sha256", "ab"], "takes 64 hex digits"),
        (["--core", "x", "--core-sha256", "ab" * 32], "--core-sha256 needs --core-url"),
        (["--sample", "--eval-tokens", "9"], "--eval-tokens needs --bpb"),
        (["--sample", "--chat-samples", "2"], "--chat-samples needs --chat-temperature above 0"),
        (
            ["--core", "x", "--core-url", "ftp://a/b.zip"],
            "--core-url is ftp://a/b.zip: it takes a URL that begins with http:// or https://, or nanochat.",
        ),
        (["--data-dir", "/nowhere"], "There is no data directory /nowhere"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    options: list[str], printed: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert printed in refusal(capfd, checkpoint, *options)


def test_a_bundle_with_too_few_items_for_the_limit_is_refused(
    checkpoint: Path, bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = refusal(capfd, checkpoint, "--core", bundle, "--core-max-per-task", "2")
    assert "the task mc is limited to 2 of 12 items, but it shows 2 examples before each item" in printed


def test_the_log_may_be_json(checkpoint: Path, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(checkpoint, "--core", bundle, "--json") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == [
        "checkpoint", "core_progress", "core_task", "core_task", "core_task", "core",
    ]  # fmt: skip
    assert lines[-1]["core_metric"] == pytest.approx(METRIC, abs=1e-12)


def test_bits_per_byte_are_those_of_the_run(
    data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(data_dir, tmp_path / "run", num_iterations=2)
    trained = tmp_path / "run" / "checkpoints" / "step_000002"
    assert evaluate(trained, "--data-dir", data_dir, "--out", tmp_path / "out") == 0
    meta = json.loads((trained / "meta.json").read_text())
    assert result_of(tmp_path / "out", "bpb")["val_bpb"] == pytest.approx(meta["val_bpb"], rel=1e-6)
    assert result_of(tmp_path / "out", "sample").startswith("The ")
    assert "core" not in json.loads((tmp_path / "out" / "eval.json").read_text())["parts"]


def test_data_with_another_tokenizer_are_refused(
    checkpoint: Path, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "have another tokenizer" in refusal(capfd, checkpoint, "--bpb", "--data-dir", data_dir)


def test_questions_are_answered(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    letters, texts = tmp_path / "letters.jsonl", tmp_path / "texts.jsonl"
    asked = {"question": "Which is eaten?", "choices": ["bread", "stone"]}
    letters.write_text("".join(json.dumps({**asked, "answer": answer}) + "\n" for answer in "AB"))
    texts.write_text(json.dumps({"question": "1 and 1?", "answer": "two"}) + "\n")
    given = ["--chat-task", letters, "--chat-task", texts, "--chat-max-tokens", "4", "--out", tmp_path]
    assert evaluate(checkpoint, *given) == 0
    found = result_of(tmp_path, "chat")
    assert {name: task["accuracy"] for name, task in found["tasks"].items()} == {"letters": 0.5, "texts": 0}
    assert found["chatcore_metric"] == 0
    assert "ChatCORE 0.0000: the mean of these" in capfd.readouterr().out
    twice = ["--chat-task", letters, "--chat-task", tmp_path / "more" / "letters.jsonl"]
    printed = refusal(capfd, checkpoint, *twice)
    assert "--chat-task has files with the same name (without its ending):" in printed
