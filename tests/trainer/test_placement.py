"""Rows by speed: the split, when it changes, and that a change changes nothing but the order of addition."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from conftest import Start, losses, train_here

from trainer.config import BY_SPEED, ConfigError, RunConfig, RunFile, parse_shares
from trainer.data.loader import equal_split, proportional_split
from trainer.distributed.process_group import Collectives, Peer
from trainer.distributed.step_sync import StepReport, StepSync
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final
from trainer.placement.batch_split import (
    REST_STEPS,
    WINDOW_STEPS,
    Balancer,
    first_split,
    relative_speeds,
    split_rows,
)
from trainer.placement.cost_model import (
    CostModel,
    Prediction,
    StepWork,
    choose_mode,
    payload,
    warn_of_baseline,
)
from trainer.placement.decide import Placement, RankMeasurements, compare_placements, decide, rank_names
from trainer.placement.microbenchmark import Link, Speed
from trainer.placement.single_host import find_obstacles
from trainer.run_plan import make_plan
from trainer.setup import RunSetup
from trainer.sync.buckets import assign_owners

PAIR = ["tower", "laptop"]
ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "gpu_stand_in"


def test_the_split_is_the_best_there_is() -> None:
    """Against every table there is."""
    draw = random.Random(3)
    for _ in range(60):
        ranks, rows = draw.randint(1, 3), draw.randint(3, 9)
        seconds = [draw.uniform(0.1, 2.0) for _ in range(ranks)]

        def end(shares: tuple[int, ...], seconds: list[float] = seconds) -> float:
            return max(s * t for s, t in zip(seconds, shares, strict=True))

        tables = itertools.product(range(1, rows + 1), repeat=ranks)
        best = min(end(shares) for shares in tables if sum(shares) == rows)
        assert end(tuple(split_rows(seconds, rows))) == pytest.approx(best)


def test_equal_ranks_keep_equal_shares() -> None:
    for ranks, rows in ((1, 4), (2, 5), (3, 8), (4, 4)):
        assert split_rows([0.7] * ranks, rows) == equal_split(rows, ranks)
        assert first_split([0.7] * ranks, rows, PAIR * 2 if ranks == 4 else ["a"] * ranks).shares == (
            equal_split(rows, ranks)
        )
    with pytest.raises(ValueError, match="2 rows cannot be split"):
        split_rows([1.0, 1.0, 1.0], 2)


def test_noise_changes_no_table() -> None:
    """Eight per cent is noise; a host at a third of the other's speed is not, and is named with its rows."""
    assert first_split([1.0, 1.08], 16, PAIR).shares == [8, 8]
    change = first_split([0.21, 0.47], 16, PAIR)
    assert change.shares == [11, 5]
    faster = "a step takes 62% of the time that it takes with equal rows"
    assert change.reason.startswith(f"tower 11 rows, laptop 5 rows: {faster}")
    assert relative_speeds([1.0, 1.09, 1.0]) == [1.0, 1.0, 1.0]
    assert relative_speeds([1.0, 2.98]) == [1.0, 0.35]


def test_other_rows_in_the_same_proportions() -> None:
    assert proportional_split([3, 2], 7) == equal_split(7, 2)
    assert proportional_split([12, 4], 10) == [8, 2]
    assert proportional_split([6, 1, 1], 3) == [2, 1, 0]
    for rows in range(1, 40):
        assert sum(proportional_split([5, 1, 2], rows)) == rows


def steps(balancer: Balancer, count: int, seconds_per_row: list[float], rest: float = 0.2) -> None:
    for _ in range(count):
        seconds = [each * rows for each, rows in zip(seconds_per_row, balancer.shares, strict=True)]
        balancer.record(seconds, max(seconds) + rest)


def test_a_host_that_slows_down_gives_rows_away() -> None:
    balancer = Balancer([8, 8], PAIR)
    steps(balancer, REST_STEPS - 1, [0.1, 0.3])
    assert balancer.propose() is None, "too early"
    steps(balancer, 1, [0.1, 0.3])
    change = balancer.propose()
    assert change is not None
    assert change.shares == [12, 4]
    assert "tower 12 rows, laptop 4 rows (it was 8/8)" in change.reason
    balancer.apply(change.shares)
    steps(balancer, 3 * REST_STEPS, [0.1, 0.3])
    assert balancer.propose() is None, "it fits"
    steps(balancer, WINDOW_STEPS, [0.1, 0.1])
    change = balancer.propose()
    assert change is not None, "the laptop is itself again"
    assert change.shares == [8, 8]


def test_what_does_not_pay_is_left_alone() -> None:
    """A slow moment, a small difference, and a large one that is a small part of the step."""
    balancer = Balancer([8, 8], PAIR)
    steps(balancer, 20, [0.1, 0.1])
    steps(balancer, 4, [0.1, 2.0])
    assert balancer.propose() is None
    balancer = Balancer([8, 8], PAIR)
    steps(balancer, 40, [0.1, 0.11])
    assert balancer.propose() is None
    balancer = Balancer([8, 8], PAIR)
    steps(balancer, 40, [0.1, 0.2], rest=20.0)
    assert balancer.propose() is None


def test_owners_by_speed() -> None:
    assert assign_owners([1.0] * 6, 2, [1.0, 0.5]).count(0) == 4
    costs = [3.0, 1.0, 2.0, 2.0]
    assert assign_owners(costs, 2, [1.0, 1.0]) == assign_owners(costs, 2)


def work(tables: int = 80_000_000) -> StepWork:
    return StepWork(
        tables=tables,
        table_width=2560,
        matrices=25_000_000,
        others=17_000_000,
        matrix_flops=(4.0,) * 32 + (12.0,) * 16,
        micro_batch=2,
        active=lambda rows: min(32_768, 600 * rows),
    )


def predictor(*speeds: Speed, bandwidth: float = 1.1e8, delay: float = 0.0) -> CostModel:
    names = [f"host-{n}" for n in range(1, 1 + len(speeds))]
    return CostModel(speeds, Link(bandwidth, 1e-3, delay), work(), names)


def test_what_is_sent_by_mode() -> None:
    """At depth 8, two ranks and 2,048 tokens each, as the specification counts it."""
    sent = {mode: payload(mode, work(), 4, 2) / 1e6 for mode in ("dense", "exact", "fast")}
    assert sent["dense"] == pytest.approx(488, rel=0.01)
    # Each rank fetches 1,200 rows of 2,560 values, half of them its own, and sends their gradients back.
    assert sent["exact"] == pytest.approx(168 + 1200 / 2 * 2560 * (4 + 4) / 1e6)
    assert sent["fast"] == pytest.approx(168 / 2 + 1200 / 2 * 2560 * (4 + 2) / 1e6)
    assert payload("exact", work(), 16, 8) / 1e6 == pytest.approx(sent["exact"] * 14 / 8)


def test_the_faster_mode_is_chosen_among_those_allowed() -> None:
    even = predictor(Speed(1.4, 2.0, 0.4), Speed(1.4, 2.0, 0.4))
    assert choose_mode(even, 16, ["dense", "exact"]) == "exact"
    slow = predictor(Speed(1.4, 2.0, 0.4), Speed(1.4, 2.0, 0.4), bandwidth=5e7)
    assert choose_mode(slow, 4, ["dense", "exact", "fast"]) == "fast"
    near = predictor(Speed(1.4, 2.0, 0.4), Speed(1.4, 2.0, 0.4), bandwidth=1e12)
    assert choose_mode(near, 4, ["dense", "exact"]) == "exact", "a rank steps half of the rows"
    near = predictor(Speed(1.4, 2.0, 0.01), Speed(1.4, 2.0, 0.01), bandwidth=1e12)
    assert choose_mode(near, 4, ["dense", "exact"]) == "dense", "no difference to speak of"
    assert even.step("exact", 16) < even.single_host(16)[0] / 1.5
    assert warn_of_baseline(even, 16, 1024, "exact") == ""


def test_every_batch_has_the_proportions_of_a_split_that_is_set() -> None:
    by_speed = predictor(Speed(0.1, 0.1, 0.05), Speed(0.3, 0.3, 0.1))
    by_hand = replace(by_speed, split=(10, 6), owners_by_speed=False)
    assert [by_hand.shares(rows) for rows in (16, 32)] == [[10, 6], [20, 12]]
    assert by_hand.owner_speeds == [1.0, 1.0]
    assert by_hand.step("dense", 16) > by_speed.step("dense", 16)


def test_transfers_that_overlap_slow_computation_down() -> None:
    """At 110 MB/s, computation hides all transfers of a step of exact; a rank's processor moves the bytes."""
    speed = Speed(1.4, 2.0, 0.4)
    assert work().backward == pytest.approx(2 / 3 * 25 / 42)
    free, slowed = (predictor(speed, speed, delay=delay) for delay in (0.0, 2e-9))
    assert free.step("exact", 4) == pytest.approx(2 * 1.4 + 2.0 / 2 + 0.4 / 2, rel=0.01)
    sent = payload("exact", work(), 4, 2)
    assert slowed.step("exact", 4) - free.step("exact", 4) == pytest.approx(2e-9 * sent)
    assert slowed.step("dense", 4) == free.step("dense", 4), "its transfers overlap with no computation"
    waits = predictor(speed, speed, bandwidth=1e7, delay=2e-9).step("exact", 4)
    hidden = work().backward * 2 * 1.4 + 2.0 / 2
    assert waits == pytest.approx(free.step("exact", 4) + sent / 1e7 - hidden * (1 - 2e-9 * 1e7), rel=0.01)


def test_a_second_host_that_does_not_pay_is_reported() -> None:
    """With the tokens a step from which it would pay, where there are any within reach."""
    slow_link, link = (
        predictor(Speed(0.2, 0.3, 0.1), Speed(0.3, 0.3, 0.1), bandwidth=rate) for rate in (1.2e7, 2e8)
    )
    for each in (slow_link, link):
        printed = warn_of_baseline(each, 4, 1024, "dense")
        assert printed.startswith("warning: host-1 alone is predicted to be faster than all ranks together: ")
        assert ": 1.2 s a step instead of " in printed
        assert "(dense) at 4,096 tokens a step. " in printed
    assert slow_link.pays_from("dense", 4) is None
    assert "not faster with 64 times as many tokens" in warn_of_baseline(slow_link, 4, 1024, "dense")
    assert all(slow_link.step("dense", rows) >= slow_link.single_host(rows)[0] for rows in range(4, 257, 4))
    from_rows = 32
    assert link.pays_from("dense", 4) == from_rows
    faster_from = f"All ranks together are faster from total_batch_size {from_rows * 1024} on"
    assert faster_from in warn_of_baseline(link, 4, 1024, "dense")
    assert link.step("dense", from_rows) < link.single_host(from_rows)[0]
    assert link.step("dense", from_rows - 4) >= link.single_host(from_rows - 4)[0]


def config(**settings: object) -> RunConfig:
    return RunConfig.from_strings({"depth": 2, "sequence_len": 1024, "total_batch_size": 16384, **settings})


def test_rank_0_decides_and_shows_why() -> None:
    settings = config(sync="auto")
    measured = [
        RankMeasurements(Speed(0.1, 0.1, 0.05), Link(1e8, 1e-3)),
        RankMeasurements(Speed(0.3, 0.3, 0.1), Link(9e7, 1e-3)),
    ]
    placement, printed = decide(
        measured, PAIR, make_plan(settings, 300, 2), work(), settings, by_speed=True, obstacles={}
    )
    assert placement.shares == (12, 4)
    assert placement.owner_speeds == (1.0, 0.35)
    assert placement.sync == "exact"
    assert placement.prediction is not None
    assert placement.prediction.sync == "exact"
    assert Placement.load(json.loads(json.dumps(placement.saved()))) == placement
    assert any("tower 12 rows, laptop 4 rows" in line for line in printed)
    assert any("tower alone" in line and "dense" in line for line in printed)
    equal, _ = decide(
        measured, PAIR, make_plan(settings, 300, 2), work(), settings, by_speed=False, obstacles={}
    )
    assert equal.shares == (8, 8)
    by_hand, _ = decide(
        measured, PAIR, make_plan(settings, 300, 2, (12, 4)), work(), settings, by_speed=False, obstacles={}
    )
    assert by_hand == placement, "the split that was set by hand is that of the prediction and of the choice"
    named, _ = decide(
        measured,
        PAIR,
        make_plan(settings, 300, 2),
        work(),
        config(sync="exact"),
        by_speed=False,
        obstacles={},
    )
    assert named.owner_speeds == (), "where nothing is open, a prediction changes nothing"
    dense = config(sync="dense")
    _, printed = decide(
        measured, PAIR, make_plan(settings, 300, 2), work(), dense, by_speed=False, obstacles={}
    )
    assert any(line.startswith("sync=auto would select exact, ") for line in printed), printed
    assert named.prediction is not None


BESIDE_A_GPU = [
    RankMeasurements(Speed(0.1, 0.1, 0.05), Link(1e8, 1e-3)),
    RankMeasurements(Speed(0.1, 0.1, 0.05), Link(1e8, 1e-3), gpu=Speed(0.002, 0.01, 0.001)),
]


def test_a_gpu_that_is_faster_alone_is_left_the_run() -> None:
    asked = config(sync="auto")
    plan = make_plan(asked, 300, 2)
    placement, printed = decide(BESIDE_A_GPU, PAIR, plan, work(), asked, by_speed=True, obstacles={})
    assert printed[-1].startswith(
        "sync is auto: A step is predicted to take 0.043 s on the GPU of laptop alone"
    )
    assert "laptop's GPU alone" in printed[0], "the table, with the figure that decides"
    assert "tower alone, on its CPU" in printed[0]
    assert len(printed) == 2, "nothing on how the ranks would have trained together"
    assert placement.faster_host is not None
    assert (placement.faster_host.rank, placement.faster_host.seconds) == (1, 0.043)
    assert placement.faster_host.together > placement.faster_host.seconds
    assert Placement.load(json.loads(json.dumps(placement.saved()))) == placement


def test_why_the_run_is_not_transferred_to_a_gpu_is_reported() -> None:
    asked = config(sync="exact")
    plan = make_plan(asked, 300, 2)
    obstacles = {0: "x", 1: "sync is exact, not auto"}
    placement, printed = decide(BESIDE_A_GPU, PAIR, plan, work(), asked, by_speed=True, obstacles=obstacles)
    assert placement.faster_host is None
    assert printed[-1].startswith("warning: A step is predicted to take 0.043 s on the GPU of laptop alone")
    assert printed[-1].endswith("The run does not move there: sync is exact, not auto.")
    slower = [RankMeasurements(Speed(0.1, 0.1, 0.05), None, gpu=Speed(0.01, 0.01, 0.001)), BESIDE_A_GPU[1]]
    auto = config(sync="auto")
    placement, _ = decide(slower, PAIR, plan, work(), auto, by_speed=True, obstacles={1: "its weights"})
    assert placement.faster_host is not None
    assert placement.faster_host.rank == 0, "one that the run can be left to goes before a faster one"


def test_obstacles_are_found_by_rank() -> None:
    peers = [Peer(0, "tower", ""), Peer(1, "laptop", "")]
    auto = config(sync="auto")
    assert find_obstacles(auto, (), {"step": 0}, peers, True) == {}
    assert find_obstacles(config(sync="exact"), (), {}, peers, True)[0] == "sync is exact, not auto"
    assert find_obstacles(auto, (3, 1), {}, peers, True)[1] == "its shares are set by hand"
    assert find_obstacles(auto, (), {"step": 3}, peers, True)[0] == "it resumes from a checkpoint"
    assert "restarted by itself" in find_obstacles(auto, (), {}, peers, False)[1]
    imported = {"step": 0, "imported": "nanochat"}
    assert find_obstacles(auto, (), imported, peers, True) == {1: "its imported weights are on tower"}


def test_a_slow_gpu_is_not_left_the_run() -> None:
    asked = config(sync="auto")
    plan = make_plan(asked, 300, 2)
    beside = BESIDE_A_GPU[0]
    slow = [beside, RankMeasurements(Speed(0.1, 0.1, 0.05), Link(1e8, 1e-3), gpu=Speed(0.2, 0.2, 0.1))]
    placement, printed = decide(slow, PAIR, plan, work(), asked, by_speed=True, obstacles={})
    assert placement.faster_host is None
    assert not any("on the GPU of" in line for line in printed)
    small = [beside, RankMeasurements(Speed(0.1, 0.1, 0.05), Link(1e8, 1e-3), gpu_too_small=True)]
    _, printed = decide(small, PAIR, plan, work(), asked, by_speed=True, obstacles={})
    assert printed[-1].startswith("warning: the GPU of laptop has too little memory")


def test_ranks_beside_a_gpu_leave_the_run_to_it(start: Start) -> None:
    """No GPU is at hand where tests run: host-2 has a stand-in, see gpu_stand_in/sitecustomize.py."""
    stand_in = {"PYTHONPATH": f"{STAND_IN}:{ROOT}"}
    settings = {"sync": "auto", "num_iterations": 2}
    pair = start(2, env=[{}, stand_in], **settings)
    ends = [rank.wait(400) for rank in pair]
    for (code, printed), rank in zip(ends, pair, strict=True):
        assert code == 1, printed
        outcome = rank.outcome()
        assert outcome["outcome"] == "final", outcome
        assert "train.yml transfers the run to host-2" in outcome["reason"]
        assert outcome["transfer"]["host"] == "host-2"
        assert 0 < outcome["transfer"]["seconds"] < outcome["transfer"]["together"]
        assert outcome["step"] == 0
    assert "predicted, s a step (tok/s)" in ends[0][1], "the table by which it was decided"

    restarted = start(2, env=[{}, stand_in], **settings)  # as systemd does, who takes no outcome away
    ends = [rank.wait(400) for rank in restarted]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "The run does not move there: it has restarted by itself" in ends[0][1]

    by_hand = start(2, name="shares", env=[{}, stand_in], shares="3,2", **settings)
    ends = [rank.wait(400) for rank in by_hand]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "The run does not move there: its shares are set by hand." in ends[0][1]
    assert by_hand[0].outcome()["transfer"] is None

    dense = start(2, name="dense", env=[{}, stand_in], sync="dense", num_iterations=1)
    ends = [rank.wait(400) for rank in dense]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "warning: the GPU of rank 1 (host-2) is idle" in ends[0][1]


def test_tables_that_differ_are_reported() -> None:
    peers = [Peer(0, "tower", ""), Peer(1, "laptop", "")]
    compare_placements(peers, ["ab", "ab"])
    with pytest.raises(Final, match=r"rank 0 is ab, but rank 1 \(laptop\) has cd"):
        compare_placements(peers, ["ab", "cd"])
    assert rank_names([*peers, Peer(2, "laptop", "")]) == ["tower", "laptop/1", "laptop/2"]
    agreement = StepSync(Collectives(RankEnv(), []), 4)
    summary = agreement.finish(agreement.start(StepReport(2.0, 0.5, 4, shares=(4,))))
    assert (summary.loss_sum, summary.seconds, summary.shares, summary.stop) == (2.0, [0.5], [4], False)
    with pytest.raises(Final, match="add up to 3 over all ranks instead of 4"):
        agreement.finish(agreement.start(StepReport(2.0, 0.5, 3)))


def test_shares_as_text(tmp_path: Path) -> None:
    assert parse_shares("auto") == "auto"
    assert parse_shares("equal") == parse_shares("") == parse_shares([]) == ()
    assert parse_shares("3,2") == (3, 2)
    with pytest.raises(ConfigError, match="it takes equal, auto, or rows per rank"):
        parse_shares("some")
    run_file = RunFile("run", RunConfig(), shares="auto")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_file.to_dict()))
    assert RunFile.load(path) == run_file
    assert (run_file.by_speed, run_file.fixed_shares) == (True, ())
    with pytest.raises(ConfigError, match="sync_allow is 'dense': it takes"):
        RunConfig(sync_allow="dense")


def test_a_prediction_is_compared_with_the_outcome() -> None:
    prediction = Prediction("exact", 5.213, 8.0, "tower")
    assert prediction.against(5.44) == "Predicted 5.21 s a step, measured 5.44."
    assert Prediction.load(asdict(prediction)) == prediction
    assert Prediction.load(None) is None


def test_shares_that_change_on_the_way_keep_the_curve(start: Start, data_dir: Path, tmp_path: Path) -> None:
    """A rank is slow on purpose: it gives rows away, the run is killed, continues with the shares it had.

    All in float64: every loss is that of one rank alone; digests are compared after every step.
    """
    settings = {"dtype": "float64", "num_iterations": 16, "total_batch_size": 192, "save_every": 2}
    settings["sync"] = "auto"
    slow = start(2, name="pair", faults=["slow 1 0", "slow 1 0.6"], shares="auto", **settings)
    slow[0].reach_step(12, seconds=400)
    for rank in slow:
        rank.process.kill()
    printed = [rank.wait()[1] for rank in slow]
    assert "rows of a step: host-1" in printed[0]
    assert "predicted, s a step (tok/s)" in printed[0]
    tables = [
        [int(line["rows.0"]), int(line["rows.1"])]
        for line in map(json.loads, (slow[0].run_dir / "metrics.jsonl").read_text().splitlines())
        if "rows.0" in line
    ]
    assert all(sum(render_predictions) == 6 for render_predictions in tables)
    assert tables[-1][0] > tables[-1][1], printed[0]

    again = start(2, name="pair", shares="auto", **settings)
    for rank in again:
        code, text = rank.wait(400)
        assert code == 0, text
    train_here(data_dir, tmp_path / "alone", **settings | {"sync": "dense", "save_every": 0})
    assert losses(again[0].run_dir) == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    meta = json.loads((again[0].run_dir / "checkpoints/step_000016/meta.json").read_text())
    assert meta["shares"] in tables
    assert meta["shares"] != [3, 3]
    assert meta["placement"]["sync"] in ("dense", "exact")
    reason = again[0].outcome()["reason"]
    assert "Predicted " in reason
    assert " s a step, measured " in reason
    facts = json.loads((again[0].run_dir / "facts.json").read_text())
    assert facts["tags"]["predicted.sync"] == meta["placement"]["sync"]


def test_the_same_hosts_resume_with_the_split_of_now() -> None:
    """A split of the checkpoint is kept by shares=auto alone."""
    setup = object.__new__(RunSetup)
    setup.group = Collectives(RankEnv(world_size=2), [Peer(0, "a", ""), Peer(1, "b", "")])
    setup.log = setup.numerics = setup.model = setup.optimizer = Mock()  # type: ignore[assignment]
    meta = {"hosts": ["a", "b"], "shares": [12, 4], "numerics": [{}, {}], "config": config().to_dict()}
    for shares, before, expected in (
        (BY_SPEED, {"shares_auto": True}, [12, 4]),
        (BY_SPEED, {}, [12, 4]),  # an older checkpoint
        (BY_SPEED, {"shares_auto": False}, [8, 8]),  # until it is measured
        ((), {"shares_auto": True}, [8, 8]),
        ((10, 6), {"shares_auto": False}, [10, 6]),
    ):
        setup.config = config()
        setup.run_file = RunFile("r", setup.config, shares=shares)
        setup.plan = make_plan(setup.config, 300, 2, setup.run_file.fixed_shares)
        with patch("trainer.setup.restore_numerics", lambda now, saved, threads: now):
            setup._restore_arithmetic(meta | before)
        assert list(setup.plan.shares) == expected


def test_a_checkpoint_that_mixes_two_views_is_not_one_of_these_hosts() -> None:
    setup = object.__new__(RunSetup)
    setup.group = Collectives(RankEnv(world_size=2), [Peer(0, "a", ""), Peer(1, "b", "")])
    meta = {"hosts": ["a", "b"], "shares": [2, 3], "numerics": [{}, {}]}
    assert setup._same_hosts(meta)
    for other in ({"hosts": ["a"]}, {"shares": [1, 2, 2]}, {"numerics": [{}]}):
        assert not setup._same_hosts(meta | other)
