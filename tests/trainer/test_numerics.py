"""Device, number format and threads: chosen by what a host measures, explained, and refused in a sentence.

No GPU is needed: what one would show of itself is given as text or as a `Gpu`, stand-ins for the real thing.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import OLD_CPU, Start, losses, train_here

from trainer.config import ConfigError
from trainer.host.gemm import gemm_rates
from trainer.host.numerics import (
    WORTHWHILE,
    Gpu,
    Numerics,
    cpu_format,
    decide_device,
    gpu_format,
    restore_numerics,
    thread_count,
)

CPU = {"cpu": "float32 on a CPU", "gpus": "0"}
CUDA = {**CPU, "gpus": "1", "cuda": "bfloat16 on a GPU"}
CROWDED = {**CPU, "gpus": "1"}
FAST, SLOW = (
    {torch.float32: 150e9, torch.bfloat16: 1130e9},
    {torch.float32: 95e9, torch.bfloat16: 2.5e9},
)


def numerics_of(rates: dict[torch.dtype, float], threads: int = 2) -> Numerics:
    compute, reason = cpu_format("auto", rates)
    return Numerics(
        torch.device("cpu"), torch.float32, compute, reason, threads, True, "a CPU (AVX512)", rates
    )


def test_rates_are_measured_in_a_moment_and_leave_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    began = time.monotonic()
    rates = gemm_rates([torch.float32, torch.bfloat16])
    assert time.monotonic() - began < 5  # 0.17 s on a host with nothing else to do
    assert rates[torch.float32] > 1e8
    assert rates[torch.bfloat16] > 1e7
    assert torch.get_num_threads() == threads


def test_a_cpu_takes_bfloat16_where_it_is_worth_it() -> None:
    compute, why = cpu_format("auto", FAST)
    assert compute == torch.bfloat16
    assert why == "1,130 GFLOP/s a core in bfloat16 against 150 in float32"
    assert cpu_format("auto", SLOW)[0] == torch.float32
    barely = {torch.float32: 1e11, torch.bfloat16: WORTHWHILE * 1e11}
    assert cpu_format("auto", barely)[0] == torch.bfloat16
    assert cpu_format("auto", {**barely, torch.float32: 1.01e11})[0] == torch.float32
    assert cpu_format("bfloat16", {torch.float32: 1e11, torch.bfloat16: 1.1e11})[0] == torch.bfloat16
    assert cpu_format("float64", {}) == (torch.float64, "as asked")
    assert cpu_format("float32", {}) == (torch.float32, "as asked")


def test_emulated_bfloat16_is_refused_with_both_figures() -> None:
    with pytest.raises(ConfigError) as caught:
        cpu_format("bfloat16", SLOW)
    printed = str(caught.value)
    assert "2.5 GFLOP/s a core in bfloat16 against 95 in float32" in printed
    assert "Set dtype to float32, or to auto" in printed


def test_a_gpu_computes_by_its_capability() -> None:
    new, old = Gpu("NVIDIA A100", "8.0", True), Gpu("Tesla T4", "7.5", False)
    assert gpu_format("auto", new) == (torch.bfloat16, "capability 8.0 has it")
    assert gpu_format("auto", old) == (torch.float32, "capability 7.5 has no bfloat16")
    assert gpu_format("float32", new) == (torch.float32, "as asked, without TF32")
    assert gpu_format("float64", old)[0] == torch.float64
    with pytest.raises(ConfigError, match=r"Tesla T4 \(capability 7.5\) only emulates it"):
        gpu_format("bfloat16", old)


def test_gpus_are_taken_when_every_rank_has_its_own() -> None:
    assert decide_device("auto", {"rank 0 (a)": CUDA, "rank 1 (b)": CUDA}) == (
        "cuda",
        "every rank has a GPU of its own",
    )
    assert decide_device("cuda", {"rank 0 (a)": CUDA}) == ("cuda", "as asked")
    assert decide_device("cpu", {"rank 0 (a)": CUDA}) == ("cpu", "as asked")
    assert decide_device("auto", {"rank 0 (a)": CPU}) == ("cpu", "there is no GPU that torch can use")
    mixed = {"rank 0 (tower)": CUDA, "rank 1 (laptop)": CPU, "rank 2 (tower)": CROWDED}
    kind, reason = decide_device("auto", mixed)
    assert kind == "cpu"
    assert reason == "rank 1 (laptop) has no GPU; rank 2 (tower) has 1 GPU, fewer than its ranks"
    with pytest.raises(
        ConfigError, match=r"device is cuda, but rank 1 \(laptop\) has no GPU; rank 2"
    ) as caught:
        decide_device("cuda", mixed)
    assert "rank 0" not in str(caught.value)


def test_only_the_refusal_of_the_device_that_is_used_counts() -> None:
    refusing = {"cpu refused": "dtype is bfloat16, but ...", "cuda refused": "a T4 only emulates it."}
    assert decide_device("auto", {"rank 0 (a)": {**CUDA, "cpu refused": "no"}})[0] == "cuda"
    with pytest.raises(ConfigError, match=r"^rank 1 \(b\): dtype is bfloat16"):
        decide_device("auto", {"rank 0 (a)": CPU, "rank 1 (b)": {**CPU, **refusing}})
    with pytest.raises(ConfigError, match=r"^a T4 only emulates it"):
        decide_device("auto", {"rank 0 (a)": {**CUDA, **refusing}})


def test_threads_are_set_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.host.cores.cpu_quota", lambda: None)
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_count(5, 1) == 5
    assert thread_count(0, 1) == 3
    for unusable in ("", "many", "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", unusable)
        assert thread_count(0, 1) == cores
    assert thread_count(0, 2) == max(1, cores // 2)
    assert thread_count(0, 1000) == 1


def test_numerics_are_reported_in_a_line_and_as_facts() -> None:
    numerics = numerics_of(FAST, threads=1)
    assert numerics.describe() == (
        "bfloat16 (1,130 GFLOP/s a core in bfloat16 against 150 in float32) on a CPU (AVX512), 1 thread, "
        "denormals flushed"
    )
    facts = numerics.facts()
    assert (facts["dtype"], facts["compute dtype"], facts["threads"]) == ("float32", "bfloat16", "1")
    assert (facts["float32 GFLOP/s"], facts["bfloat16 GFLOP/s"]) == ("150.0", "1130.0")
    assert all(isinstance(value, str) for value in facts.values())


def test_a_run_goes_on_in_the_numerics_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    began = numerics_of({torch.float32: 1e11, torch.bfloat16: 2e11}, threads=1)
    now = numerics_of({torch.float32: 1e11, torch.bfloat16: 1.4e11}, threads=2)
    assert (began.compute_dtype, now.compute_dtype) == (torch.bfloat16, torch.float32)
    saved = json.loads(json.dumps(began.saved()))
    try:
        same = restore_numerics(now, saved)
        assert (same.compute_dtype, same.threads) == (torch.bfloat16, 1)
        assert same.saved() == saved
        assert torch.get_num_threads() == 1
        assert same.reason.startswith("as before; ")
        assert restore_numerics(began, saved) == began

        emulating = numerics_of(SLOW)
        assert restore_numerics(emulating, saved).compute_dtype == torch.float32
        on_gpu = replace(now, device=torch.device("meta"))
        assert restore_numerics(on_gpu, saved) == on_gpu
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert restore_numerics(now, saved).threads == 2
    finally:
        torch.set_num_threads(threads)


def test_an_old_cpu_refuses_bfloat16_on_all_ranks(start: Start) -> None:
    """Really emulated: oneDNN is set to use nothing newer than AVX2."""
    ranks = start(2, env=[{}, OLD_CPU], dtype="bfloat16")
    for rank in ranks:
        code, printed = rank.wait()
        assert code == 2, printed
        assert "Traceback" not in printed
        outcome = rank.outcome()
        assert outcome["outcome"] == "final"
        found = re.search(
            r"rank 1 \(host-2\): dtype is bfloat16, but .* ([\d.]+) GFLOP/s a core in bfloat16 "
            r"against ([\d.,]+) in float32\. Set dtype to",
            outcome["reason"],
        )
        assert found, outcome["reason"]
        assert float(found[1]) < float(found[2].replace(",", ""))


def test_a_resumed_run_keeps_what_it_computed_in(start: Start) -> None:
    """Begun on an old CPU and resumed on this one. Where bfloat16 is not fast, there is nothing to keep."""
    (old,) = start(1, env=[OLD_CPU], dtype="auto", num_iterations=400)
    old.reach_step(1)
    (old.run_dir / "stop").touch()
    code, printed = old.wait()
    assert code == 0, printed
    checkpoint = old.run_dir / old.outcome()["checkpoint"]
    saved = json.loads((checkpoint / "meta.json").read_text())["numerics"]
    assert saved == [
        {"device": "cpu", "compute_dtype": "float32", "gemm_library": "default", "threads": 1, "cpus": ""}
    ]

    (new,) = start(1, dtype="auto", num_iterations=400)
    new.reach_step(json.loads((checkpoint / "meta.json").read_text())["step"] + 1)
    (new.run_dir / "stop").touch()
    code, printed = new.wait()
    assert code == 0, printed
    chosen = re.search(r"  rank 0 \(host-1\): (\w+) \(", printed)
    assert chosen is not None
    assert ("Restored from the checkpoint: float32" in printed) == (chosen[1] == "bfloat16")
    newest = new.run_dir / new.outcome()["checkpoint"]
    assert newest != checkpoint
    assert json.loads((newest / "meta.json").read_text())["numerics"] == saved


def test_ranks_of_unlike_formats_hold_equal_weights(start: Start, data_dir: Path, tmp_path: Path) -> None:
    """An old CPU takes float32; a new one takes bfloat16, and then the two multiply in unlike formats.

    Every step compares all bytes. On a CPU without fast bfloat16 both take float32, as `printed` then has it.
    """
    pair = start(2, env=[{}, OLD_CPU], dtype="auto", num_iterations=12)
    train_here(data_dir, tmp_path / "alone", num_iterations=12)
    for rank in pair:
        code, printed = rank.wait()
        assert code == 0, printed
    chosen = {int(found[1]): found[2] for found in re.finditer(r"  rank (\d) \(host-\d\): (\w+) \(", printed)}
    rates = gemm_rates([torch.float32, torch.bfloat16])
    if rates[torch.bfloat16] > 1.2 * WORTHWHILE * rates[torch.float32]:
        assert chosen[0] == "bfloat16"
    assert chosen[1] == "float32"
    alone, curve = losses(tmp_path / "alone"), losses(pair[0].run_dir)
    assert curve == pytest.approx(alone, rel=0.02)
    assert (curve != alone) or chosen[0] == "float32"
    assert alone[-1] < alone[0] - 0.5
