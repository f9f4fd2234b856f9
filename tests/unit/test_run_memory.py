"""The memory and disk that a run needs on a host."""

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_memory import Need


def test_the_checkpoint_follows_the_parameter_count() -> None:
    # spec: 125.8 M parameters and 1.4 GB a checkpoint at depth 8.
    assert Need({"depth": 8}).parts["weights"] == pytest.approx(125_829_354 * 4 / 2**30, rel=1e-3)
    assert Need({"depth": 8}).checkpoint_gb * 2**30 / 1e9 == pytest.approx(1.41, abs=0.01)


def test_a_worker_keeps_no_copy_and_a_gpu_no_weights() -> None:
    assert Need({"depth": 8}, coordinates=False).copy_gb == 0
    assert Need({"depth": 12}, coordinates=False, on_gpu=True).memory_gb < 3


def test_exact_divides_the_optimizer_state_and_fast_all_but_that_of_lm_head() -> None:
    dense, exact, fast = (
        {n: Need({"depth": 8, "sync": sync}, world_size=n) for n in (1, 2, 4)}
        for sync in ("dense", "exact", "fast")
    )
    # 100.7 M values of the tables with two moments, 25.2 M of matrices with one.
    assert exact[1].parts["optimizer"] == pytest.approx(dense[1].parts["optimizer"])
    assert exact[4].parts["optimizer"] == pytest.approx(exact[1].parts["optimizer"] / 4)
    moments_of_head = 2 * 4 * 512 * 32768 / 2**30
    assert fast[2].parts["optimizer"] == pytest.approx(exact[2].parts["optimizer"] + moments_of_head / 2)
    # 83.9 M values of the embeddings have no gradient of their own.
    assert exact[2].parts["gradients"] < dense[2].parts["gradients"] - 0.2
    assert dense[2].checkpoint_gb == exact[2].checkpoint_gb
