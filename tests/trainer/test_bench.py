"""`python -m trainer bench`: its figures are the training's own, and it leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RATES, TINY, flags, free_port

from trainer.__main__ import main
from trainer.bench import DDP, WARM_STEPS
from trainer.bench import cli as bench_cli
from trainer.bench.limits import Rates, StepOperations, count_operations, iterated_flops
from trainer.bench.steps import share_of_limit
from trainer.config import SYNC_MODES, ConfigError, RunConfig
from trainer.formatting import markdown_table
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.tracking.files import METRICS

SETTINGS = {name: TINY[name] for name in ("aspect_ratio", "head_dim", "sequence_len", "dtype", "threads")}


def bench(tmp_path: Path, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    out = tmp_path / "result.json"
    start = ["-m", "trainer"]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
        start += [f"--master-port={free_port()}", "--max-restarts=0", "-m", "trainer"]
    command = [sys.executable, *start, "bench", *flags(SETTINGS), "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "limit" in done.stdout
    return dict(json.loads(out.read_text()))


def test_work_of_depth_8() -> None:
    """The figures that the targets were set with."""
    with torch.device("meta"):
        model = GPT(GPTConfig.from_depth(8, vocab_size=32_768))
    optimizer = build_optimizer(model, **RATES)
    names = [matrix.name for matrix in optimizer.muon_parameters()]
    work = count_operations(model, optimizer, names, tokens=2048)
    assert work.model_flops == pytest.approx(2048 * 0.2737e9, rel=1e-3)
    assert work.muon_flops == pytest.approx(322e9, rel=2e-3)
    assert work.adamw_bytes == pytest.approx(2.8e9, rel=0.01)
    half = count_operations(model, optimizer, names[: len(names) // 2], tokens=2048)
    assert half.muon_flops < 0.6 * work.muon_flops
    assert half.adamw_bytes == work.adamw_bytes


def test_limit_is_products_and_bytes() -> None:
    work = StepOperations(model_flops=600, muon_flops=400, adamw_bytes=50)
    assert work.seconds(Rates(gemm=100.0, copy=25.0)) == 12.0
    assert Rates.median([Rates(1.0, 5.0), Rates(2.0, 4.0), Rates(9.0, 3.0)]) == Rates(2.0, 4.0)
    assert iterated_flops(4, 2) == iterated_flops(2, 4) == 5 * (4 * 16 + 2 * 8)


def test_a_step_is_compared_with_what_was_measured_beside_it() -> None:
    """A host at half its speed for a while is as near to its limit as before."""
    assert share_of_limit([[8.0, 8.0, 16.0, 16.0, 16.0]], [10.0, 15.0, 20.0, 20.0]) == pytest.approx(0.8)
    assert share_of_limit([[6.0, 4.0], [4.0, 8.0]], [10.0]) == pytest.approx(0.7), "by the slower rank"
    assert share_of_limit([[6.0, 8.0], [4.0, 6.0]], [10.0, 9.0, 20.0]) == pytest.approx(0.7)


@pytest.mark.processes
def test_one_process(tmp_path: Path) -> None:
    result = bench(tmp_path, "--depth", "2", "--rows", "3", "--steps", "4")
    assert (result["depth"], result["tokens"], result["world_size"], result["steps"]) == (2, 3 * 32, 1, 4)
    assert len(result["step_seconds_all"]) == 4
    assert min(result["step_seconds_all"]) <= result["step_seconds"] <= max(result["step_seconds_all"])
    assert result["split"]["forward"] > 0
    assert sum(result["split"].values()) < 3 * result["step_seconds"]
    (rank,) = result["ranks"]
    assert rank["peak_rss"] > 2e8  # torch alone is more
    assert 0 < rank["limit_seconds"] < result["step_seconds"]
    assert result["share_of_limit"] == share_of_limit([rank["limit_seconds_all"]], result["step_seconds_all"])
    assert len(rank["rates_all"]) == 5, "before, between and after the steps that count"
    assert min(one["gemm"] for one in rank["rates_all"]) > 1e9
    products = [one["gemm"] for one in rank["rates_all"]]
    assert min(products) <= rank["rates"]["gemm"] <= max(products)
    assert result["step_seconds_mean"] == pytest.approx(sum(result["step_seconds_all"]) / 4, rel=0.2), (
        "a step ends where measuring begins"
    )
    assert rank["reduce_bandwidth"] is None
    assert result["predicted_seconds"] is None, "there is nothing to hold one process against"
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("nanofleet")]
    assert left == []


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_count_what_they_send(tmp_path: Path) -> None:
    """Dense sends every gradient and weight once at two ranks; rows of embeddings alone are less."""
    dense = bench(tmp_path, "--depth", "2", "--steps", "3", "--sync", "dense", ranks=2)
    assert dense["predicted_seconds"] > 0
    exact = bench(tmp_path, "--depth", "2", "--steps", "3", "--sync", "exact", ranks=2)
    assert dense["shares"] == [2, 2]
    for rank in (*dense["ranks"], *exact["ranks"]):
        assert rank["reduce_bandwidth"] > 1e6
        assert len(rank["rates_all"]) == 4, "before, between and after the steps that count"
        assert rank["sent"] > 0.9 * rank["counted"]  # both ranks' traffic goes over loopback
    assert exact["ranks"][0]["counted"] < dense["ranks"][0]["counted"] / 2
    # A round of local has each parameter once, in a byte; the last meeting of a run is not among its steps.
    round_of_three = bench(
        tmp_path, "--depth", "2", "--steps", "3", "--sync", "local", "--local-steps", "3", ranks=2
    )
    sent = 3 * round_of_three["ranks"][0]["counted_mean"]
    assert sent < 1.1 * dense["ranks"][0]["counted"] / 4
    times = {len(rank["rates_all"]) for rank in round_of_three["ranks"]}
    assert times == {1}, "a fragment is in flight between any two of its steps"


@pytest.mark.processes
@pytest.mark.parametrize(
    "split", [pytest.param(("--rows", "3"), marks=pytest.mark.slow), ("--shares", "5,1")]
)
def test_plain_ddp_trains_as_exact_does(split: tuple[str, str], tmp_path: Path, data_dir: Path) -> None:
    """Equal losses after steps of an optimizer that every rank takes as a whole, in several micro-batches."""
    rates = {name: TINY[name] for name in ("unembedding_lr", "embedding_lr", "matrix_lr")}
    settings = [*flags({**rates, "dtype": "float64", "device_batch_size": 2}), "--depth", "2", *split]
    losses, results = {}, {}
    for name, mode in {"exact": ["--sync", "exact"], "ddp": ["--ddp"]}.items():
        run_dir = tmp_path / name
        arguments = ["--data-dir", str(data_dir), "--run-dir", str(run_dir), *settings, *mode, "--steps", "6"]
        results[name] = bench(tmp_path, *arguments, ranks=2)
        lines = map(json.loads, (run_dir / METRICS).read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert losses["exact"][-1] < losses["exact"][0] - 0.3, "the weights change"
    assert losses["ddp"] == pytest.approx(losses["exact"], rel=1e-10)
    ddp, exact = results["ddp"], results["exact"]
    assert (ddp["sync"], exact["sync"], ddp["predicted_seconds"]) == ("ddp", "exact", None)
    assert ddp["split"]["sync"] > 0, "the wait within backward counts as sync"
    for rank in ddp["ranks"]:
        # Whole gradients of two ranks; the buffers and the step report are little beside them.
        model = GPT(GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16))
        assert rank["counted"] == pytest.approx(8 * model.param_counts()["total"], rel=0.1)
        assert rank["work"]["muon_flops"] > 1.5 * exact["ranks"][0]["work"]["muon_flops"], "no owner ranks"


@pytest.mark.processes
def test_an_all_reduce_of_the_bytes_of_a_step_is_timed(tmp_path: Path) -> None:
    for rank in bench(tmp_path, "--depth", "2", "--steps", "2", "--ddp", ranks=2)["ranks"]:
        assert rank["reduce_measured"] > 0
        assert rank["reduce_computed"] > 0.99 * rank["counted"] / rank["reduce_bandwidth"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ddp"], "torchrun --nproc-per-node 2"),
        (["--ddp", "--sync", "exact"], "leave out --ddp or --sync"),
    ],
)
def test_plain_ddp_needs_ranks_and_is_no_sync_mode(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_cannot_be_trained_with_plain_ddp() -> None:
    assert DDP not in SYNC_MODES
    with pytest.raises(ConfigError, match="sync is 'ddp': it must be dense"):
        RunConfig.from_strings({"sync": DDP})


@pytest.mark.processes
def test_its_own_data(tmp_path: Path, data_dir: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["--data-dir", str(data_dir), "--run-dir", str(run_dir), "--depth", "2", "--steps", "2"]
    bench(tmp_path, *arguments)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, WARM_STEPS + 2 + 1))
    assert json.loads((run_dir / "outcome.json").read_text())["outcome"] == "finished"
    assert not (run_dir / "checkpoints").exists()
    assert (run_dir / "bench.json").exists()


@pytest.mark.processes
def test_several_make_a_table(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "trainer", "bench", *flags(SETTINGS), "--steps", "2", "--out", str(out)]
    done = subprocess.run(
        [*command, "--depth", "2", "3", "--rows", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [result["depth"] for result in json.loads(out.read_text())] == [2, 3]
    assert len(done.stdout.splitlines()) == 4
    assert done.stdout.startswith("| depth ")


def test_ranks_measure_one_thing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--depth", "4", "8"]) == 2
    assert "one case" in capsys.readouterr().err
    assert main(["bench", "--steps", "0"]) == 2


@pytest.mark.parametrize("option", [("--run-dir", "out"), ("--shares", "1,1")])
def test_a_table_keeps_no_run_directory_and_no_shares(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--depth", "2", "4", *option]) == 2
    assert "--run-dir and --shares are for one case" in capsys.readouterr().err


def test_a_markdown_table_lines_up() -> None:
    assert markdown_table([["a", "bb"], ["ccc", "d"]]).splitlines() == [
        "| a   | bb |",
        "|-----|----|",
        "| ccc | d  |",
    ]


def test_a_sequence_length_need_not_divide_the_default_batch() -> None:
    parser = argparse.ArgumentParser()
    bench_cli.add_arguments(parser)
    args = parser.parse_args(["--depth", "2", "--rows", "2", "--sequence-len", "768"])
    assert bench_cli.bench_run_file(args, RankEnv()).config.total_batch_size == 2 * 768
    args.sequence_len = "1k"
    with pytest.raises(ConfigError, match="sequence_len"):
        bench_cli.bench_run_file(args, RankEnv())
