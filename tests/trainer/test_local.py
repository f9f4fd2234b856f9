"""The local mode: what ranks that train by themselves have in common, and what that costs on the wire."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RATES, Start
from counted_bytes import predicted_bytes
from local_ranks import Rank, Room, batches_of, equal, look, resume, together
from torch import Tensor

from trainer.checkpoint.rank_state import load_rank_state, save_rank_state
from trainer.config import NEAR_MODES, ConfigError, RunConfig
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.run_plan import describe_plan, make_plan
from trainer.sync.fragment import Outer
from trainer.sync.quantize import BLOCK, Quantizer

D8 = GPTConfig.from_depth(8, vocab_size=32768, sequence_len=1024)
# Different tokens in 62 steps of 4,096: of text like the demo's, 245,760 tokens have 16,600.
WINDOW_ROWS = 17000


@pytest.mark.parametrize("rows", [(1, 3, 2), (4,)])
def test_meeting_after_each_step_is_the_mean_weighted_by_tokens(rows: tuple[int, ...]) -> None:
    """One step between meetings, outer rate 1, no momentum, no rounding; three ranks, unequal, and one alone.

    Held against the mean of what the ranks have right before they meet. Ranks simulated a second time would
    not do: AdamW divides by its tiny eps what are zeros but for rounding, as the first gradients of scalars.
    """
    world_size, steps = len(rows), 3
    room, outer = Room(world_size), Outer(steps=1, lr=1.0, momentum=0.0, bits=32, delay=0)
    ranks = [Rank(rank, world_size, room, outer, torch.float64) for rank in range(world_size)]

    def work(rank: Rank) -> list[Tensor]:
        seen = []
        for step in range(steps):
            rank.train(batches_of(step, rows))
            seen += rank.own()
            rank.sync.broadcast()
            assert equal(rank.own(), rank.in_common())
            seen += rank.own()
        return seen

    seen = together(ranks, work)
    names = [name for name, _ in ranks[0].model.named_parameters()]
    for step in range(steps):
        first = 2 * step * len(names)
        for number, name in enumerate(names, start=first):
            apart = [values[number] for values in seen]
            after = [values[number + len(names)] for values in seen]
            assert equal(after, [after[0]] * world_size)
            largest = max(value.abs().max() for value in [*apart, *after])
            # Some 20 roundings of numbers that are at most twice the largest, by half of eps each.
            tolerance = 20 * torch.finfo(torch.float64).eps * largest
            mean = sum(n * value for n, value in zip(rows, apart, strict=True)) / sum(rows)
            assert (after[0] - mean).abs().max() <= tolerance, (step, name)
            if world_size > 1 and step == 1 and apart[0].dim() == 2:
                assert (sum(apart) / world_size - mean).abs().max() > 1e6 * tolerance, "tokens weigh nothing"


def test_second_moments_forget_by_the_token() -> None:
    """After as many tokens, a rank's AdamW has forgotten as much as one with the rows of all ranks."""
    rows, outer, room = (1, 3, 4), Outer(steps=30), Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]
    built = [dict(group) for group in build_optimizer(ranks[0].model, **RATES).param_groups]

    def work(rank: Rank) -> list[Tensor]:
        for step in range(2):
            rank.step(batches_of(step, rows))
        return []

    together(ranks, work)
    for of_rank, rank in zip(rows, ranks, strict=True):
        for group, before in zip(rank.optimizer.param_groups, built, strict=True):
            if group["kind"] == "adamw":
                beta1, beta2 = group["betas"]
                assert beta1 == before["betas"][0]
                steps_of_as_many_tokens = sum(rows) / of_rank
                assert beta2**steps_of_as_many_tokens == pytest.approx(before["betas"][1], rel=1e-12)
            else:
                assert group["beta2"] == before["beta2"]


COMPRESSIONS = [{"bits": 8}, {"bits": 4}, {"bits": 2}, {"bits": 2, "topk": 320}]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_ranks_agree_bitwise_and_continue_run_bitwise(compression: dict[str, Any]) -> None:
    """Three unequal ranks that differ between meetings; broken off after step 7 and taken up elsewhere."""
    rows, outer, room = (1, 3, 2), Outer(steps=4, delay=1, **compression), Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]

    def work(rank: Rank) -> list[Tensor]:
        seen = []
        for step in range(7):
            rank.step(batches_of(step, rows))
            seen += rank.in_common() if step % 3 == 0 else []
        return seen + rank.in_common()

    seen = together(ranks, work)
    assert equal(seen[0], seen[1])
    assert equal(seen[0], seen[2])
    mine = [[p.detach().clone() for p in rank.model.parameters()] for rank in ranks]
    assert not equal(mine[0], mine[1])

    with ThreadPoolExecutor(3) as pool:
        looks = list(pool.map(look, ranks))
    saved = [(seen, rank.optimizer.state_dict()) for seen, rank in zip(looks, ranks, strict=True)]
    others = resume(saved, 7, outer, [True] * 3)

    def continue_run(rank: Rank) -> list[Tensor]:
        for step in range(7, 12):
            rank.step(batches_of(step, rows))
        rank.sync.finish()
        return rank.in_common()

    ends, resumed = together(ranks, continue_run), together(others, continue_run)
    assert all(equal(ends[0], end) for end in [*ends, *resumed])
    mine = [[p.detach().clone() for p in rank.model.parameters()] for rank in ranks]
    assert equal(mine[0], mine[2]), "after the end nobody has anything of its own"


@pytest.mark.processes
@pytest.mark.parametrize("rows", [(4,), (1, 3), (1, 3, 2)])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_looking_does_not_change_the_training(rows: tuple[int, ...], delay: int) -> None:
    """Every parameter after every step is that of ranks which nobody looks at, also in a sync round."""
    ends = []
    for every in (0, 1, 3):
        room, outer = Room(len(rows)), Outer(steps=4, delay=delay)
        ranks = [Rank(rank, len(rows), room, outer, torch.float32) for rank in range(len(rows))]

        def work(rank: Rank, every: int = every) -> list[Tensor]:
            seen = []
            for step in range(1, 10):
                rank.step(batches_of(step, rows))
                if every and step % every == 0:
                    look(rank)
                seen += rank.own()
            rank.sync.finish()
            return seen + rank.own()

        ends.append(together(ranks, work))
    assert all(equal(end, quiet) for looked in ends[1:] for end, quiet in zip(looked, ends[0], strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("compression", [COMPRESSIONS[0], COMPRESSIONS[3]], ids=str)
def test_a_checkpoint_in_a_sync_round_resumes_bitwise(compression: dict[str, Any]) -> None:
    """Saved after each step in turn: fragments of all kinds are in flight, for one step and for two."""
    rows, outer, last = (1, 3, 2), Outer(steps=4, delay=2, **compression), 10
    room = Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]
    saved: list[list[Any]] = [[] for _ in ranks]
    in_flight: set[str] = set()

    def train(rank: Rank) -> list[Tensor]:
        for step in range(last):
            rank.step(batches_of(step, rows))
            saved[rank.rank].append((look(rank), copy.deepcopy(rank.optimizer.state_dict())))
        rank.sync.finish()
        return rank.own()

    ends = together(ranks, train)
    for step in range(1, last):
        states = [of_rank[step - 1] for of_rank in saved]
        in_flight |= {name for name, state in states[0][0][1].items() if "round_table" in state}
        others = resume(states, step, outer, [True] * 3)
        assert others[0].sync.is_idle() == (not any("round_table" in s for s in states[0][0][1].values()))

        def continue_run(rank: Rank, step: int = step) -> list[Tensor]:
            for later in range(step, last):
                rank.step(batches_of(later, rows))
            rank.sync.finish()
            return rank.own()

        assert all(equal(end, ends[0]) for end in together(others, continue_run)), f"saved after step {step}"
    assert len(in_flight) == len(ranks[0].sync._fragments), "some fragment was never in flight"


@pytest.mark.parametrize("owned", [(True, True, False), (False, False, False), (True, True)])
def test_ranks_without_their_own_file_finish_the_sync_round(owned: tuple[bool, ...]) -> None:
    """On a new host, or on fewer: all ranks take the outer step of those that sent, and agree bitwise."""
    rows, outer = (1, 3, 2), Outer(steps=4, bits=8, delay=2)
    room = Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]

    def train(rank: Rank) -> list[Tensor]:
        for step in range(6):
            rank.step(batches_of(step, rows))
        saved[rank.rank] = (look(rank), copy.deepcopy(rank.optimizer.state_dict()))
        for fragment in rank.sync._fragments:
            if fragment.sync_round:
                rank.sync._finish_round(fragment)
        return rank.in_common()

    saved: dict[int, Any] = {}
    arrived = together(ranks, train)
    others = resume([saved[rank] for rank in range(3)], 6, outer, owned)
    assert not others[0].sync.is_idle()

    def continue_run(rank: Rank) -> list[Tensor]:
        for fragment in rank.sync._fragments:
            if fragment.sync_round:
                rank.sync._finish_round(fragment)
        outer_parameters = rank.in_common()
        for step in range(6, 9):
            rank.step(batches_of(step, rows[: len(owned)]))
        rank.sync.finish()
        return outer_parameters + rank.own()

    ends = together(others, continue_run)
    assert all(equal(end, ends[0]) for end in ends)
    assert equal(ends[0][: len(arrived[0])], arrived[0]), "the outer step is that of the ranks that sent"


def test_a_state_without_a_sync_round_is_loaded() -> None:
    """As checkpoints have it that were written with nothing in flight."""
    rank = Rank(0, 1, Room(1), Outer(steps=4, delay=2), torch.float32)
    rank.step(batches_of(0, (4,)))
    weights, common, own = look(rank)
    for state in common.values():
        for key in [key for key in state if key.startswith("round_")]:
            del state[key]
    own = {name: value for name, value in own.items() if not name.startswith("sent/")}
    [again] = resume(
        [((weights, common, own), rank.optimizer.state_dict())], 1, Outer(steps=4, delay=2), [True]
    )
    assert again.sync.is_idle()
    again.step(batches_of(1, (4,)))
    again.sync.finish()
    assert equal(again.own(), again.in_common())


def test_one_rank_alone_meets_itself() -> None:
    outer = Outer(steps=2, lr=1.0, momentum=0.0, bits=8, delay=1)
    rank = Rank(0, 1, Room(1), outer, torch.float32)
    alone, errors = rank.in_common(), []
    [idx] = batches = batches_of(0, (4,))
    for _ in range(6):
        rank.step(batches)
        errors.append(rank.model(idx[:, :-1], idx[:, 1:]).item())
    rank.sync.finish()
    assert equal(rank.own(), rank.in_common())
    assert not equal(rank.own(), alone)
    assert errors[-1] < errors[0] - 0.5


@pytest.mark.parametrize(("bits", "levels"), [(4, 7), (8, 127)])
def test_no_number_is_off_by_more_than_half_a_level(bits: int, levels: int) -> None:
    torch.manual_seed(2)
    values = torch.randn(5 * BLOCK + 3) * torch.logspace(-9, 3, 5 * BLOCK + 3)
    values[BLOCK : 2 * BLOCK] = 0
    quantiser = Quantizer(bits)
    packed = quantiser.pack(values)
    assert packed.dtype == torch.uint8
    assert len(packed) == 6 * BLOCK * bits // 8 + 6 * 4
    back = quantiser.unpack(packed, len(values), torch.float32)
    for block, found in zip(values.split(BLOCK), back.split(BLOCK), strict=True):
        assert (found - block).abs().max() <= block.abs().max() / levels * (0.5 + 1e-5)
    assert torch.equal(back[BLOCK : 2 * BLOCK], torch.zeros(BLOCK))
    exact = Quantizer(32)
    assert torch.equal(exact.unpack(exact.pack(values), len(values), values.dtype), values)


def test_what_rounding_takes_is_not_lost() -> None:
    """The errors of single rounds are fed back: after many of them the sum is right to one level."""
    torch.manual_seed(3)
    quantiser, error, sent = Quantizer(4), torch.zeros(BLOCK), torch.zeros(BLOCK)
    value = torch.rand(BLOCK)
    for _ in range(50):
        packed = quantiser.pack(value + error)
        out = quantiser.unpack(packed, BLOCK, torch.float32)
        error = value + error - out
        sent += out
    assert (sent - 50 * value).abs().max() < 0.2
    assert (quantiser.unpack(quantiser.pack(value), BLOCK, torch.float32) * 50 - 50 * value).abs().max() > 1


def test_payload_of_a_step_at_depth_8() -> None:
    """Amortised over 30 steps, two ranks: 42 million numbers and the rows of embeddings that had tokens."""
    for bits, most in ((8, 5e6), (4, 2.5e6), (2, 0.8e6)):
        sent = [predicted_bytes("local", D8, 2, rank, WINDOW_ROWS, Outer(bits=bits)) for rank in (0, 1)]
        assert max(sent) <= most
    every_row = predicted_bytes("local", D8, 2, 0, 32768, Outer())
    assert max(sent) < every_row <= 5e6


def test_rates_are_those_of_all_tokens() -> None:
    config = RunConfig(sync="local", total_batch_size=8192)
    local = make_plan(config, 32768, 2)
    single = make_plan(RunConfig(total_batch_size=8192), 32768, 1)
    assert local.scales == single.scales
    assert (local.rows_per_step, local.total_batch_size) == (8, 8192)
    with torch.device("meta"):
        printed = describe_plan(local, config, GPT(local.model), train_rows=1000, micro_batches=[2, 2])
    assert "each rank trains by itself on 4,096 tokens a step; a sync round after every 30 steps" in printed


def test_auto_does_not_take_it() -> None:
    with pytest.raises(
        ConfigError, match=f"sync_allow is 'fast,local': it takes {', '.join(NEAR_MODES)}, or nothing"
    ):
        RunConfig(sync="auto", sync_allow="fast,local")


def test_a_delay_as_long_as_the_way_is_refused() -> None:
    RunConfig(local_steps=1)  # with another sync mode it means nothing
    with pytest.raises(ConfigError, match=r"it must be at least 0 and below local_steps \(1\); use 0\."):
        RunConfig(sync="local", local_steps=1)
    with pytest.raises(ConfigError, match="local_bits is 3"):
        RunConfig(local_bits=3)


def test_a_rank_finds_its_own_file_and_no_other(tmp_path: Path) -> None:
    own = {"own/wte": torch.ones(3)}
    optim = {"wte": {"exp_avg": torch.full((3,), 2.0)}}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "step_000003-rank1.tmp").touch()  # of a save that was killed
    hashes = [save_rank_state(tmp_path, step, 1, own, optim, keep=2) for step in (4, 5, 10, 15)]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [
        "step_000005-rank1.pt",  # while the coordinator writes step 15, it has kept 5 and 10
        "step_000010-rank1.pt",
        "step_000015-rank1.pt",
    ]
    found = load_rank_state(tmp_path, {"step": 15, "own_sha256": ["", hashes[3]]}, 1)
    assert found is not None
    assert equal(list(found[0].values()), list(own.values()))
    assert torch.equal(found[1]["wte"]["exp_avg"], optim["wte"]["exp_avg"])
    assert load_rank_state(tmp_path, {"step": 15, "own_sha256": ["", "0" * 64]}, 1) is None
    assert load_rank_state(tmp_path, {"step": 4, "own_sha256": ["", hashes[0]]}, 1) is None
    assert load_rank_state(tmp_path, {"step": 15, "own_sha256": [""]}, 1) is None
    for step in (999_999, 1_000_000):
        save_rank_state(tmp_path, step, 1, own, optim, keep=0)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step_1000000-rank1.pt"]
    with pytest.raises(RuntimeError, match="meta"):
        save_rank_state(tmp_path, 20, 1, {"own/wte": torch.empty(3, device="meta")}, {}, keep=2)
    assert not list((tmp_path / "own").glob("*.tmp"))


def test_two_ranks_killed_and_resumed_end_as_those_left_alone(start: Start) -> None:
    """Processes, with a checkpoint of the run's parameters and a file of each rank's own."""
    settings = {"sync": "local", "local_steps": 4, "num_iterations": 60, "save_every": 5, "save_minutes": 0}
    settings |= {"digest_every": 7, "shares": "2,3"}
    alone = start(2, name="alone", **settings)
    killed = start(2, name="killed", **settings)
    killed[0].reach_step(20)
    for rank in killed:
        rank.process.kill()
        rank.wait()
    again = start(2, name="killed", **settings)
    printed = []
    for rank in [*alone, *again]:
        code, text = rank.wait()
        assert code == 0, text
        printed.append(text)
    assert "Resuming from the checkpoint of step" in printed[2]
    assert "has no state of rank" not in printed[2] + printed[3]
    ends = [
        json.loads((ranks[0].run_dir / "checkpoints/step_000060/meta.json").read_text())
        for ranks in (alone, again)
    ]
    assert ends[0]["sha256"]["model.safetensors"] == ends[1]["sha256"]["model.safetensors"]
    assert ends[0]["own_sha256"] == ends[1]["own_sha256"]
