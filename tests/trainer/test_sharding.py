"""Optimizer state and embedding rows that are sharded over ranks: the same numbers, the same checkpoint."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import RATES, Start, losses
from counted_bytes import CountingGroup
from torch import nn

from trainer.checkpoint.storage import State, checkpoints, load
from trainer.distributed.process_group import Collectives
from trainer.elastic.keys import Member, View
from trainer.elastic.setup import ElasticSetup
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.optim.row_adamw import RowAdamW
from trainer.sync.modes import make_sync
from trainer.sync.row_shards import owners_of_blocks


def saved(run_dir: Path) -> State:
    return load(checkpoints(run_dir / "checkpoints")[0])


def test_two_ranks_of_exact_save_the_bits_of_dense(start: Start) -> None:
    """No digest refreshes the tables: a rank trains with rows that it has fetched."""
    settings = {"num_iterations": 12, "digest_every": 0, "save_minutes": 0, "embedding_lr": 0.3}
    runs = {sync: start(2, name=sync, sync=sync, **settings) for sync in ("dense", "exact")}
    for ranks in runs.values():
        for rank in ranks:
            code, printed = rank.wait()
            assert code == 0, printed
    dense, exact = (runs[sync][0].run_dir for sync in ("dense", "exact"))
    assert losses(exact) == losses(dense)
    one, two = saved(dense), saved(exact)
    assert one.optim.keys() == two.optim.keys()
    for name, weights in one.model.items():
        assert torch.equal(weights, two.model[name]), name
        assert one.optim[name].keys() == two.optim[name].keys()
        for key, tensor in one.optim[name].items():
            assert torch.equal(tensor, two.optim[name][key]), f"{name}/{key}"


@pytest.mark.parametrize("sync", ["exact", "fast"])
def test_state_that_two_ranks_have_saved_is_resumed_by_three(sync: str, start: Start) -> None:
    """The curve is that of one rank, though each rank resumes with the state of other rows."""
    settings = {"sync": sync, "dtype": "float64", "digest_every": 4, "save_minutes": 0, "eval_every": 5}
    runs = {"alone": (1, 1), "moved": (2, 3)}
    for part, steps in enumerate((8, 16)):
        ranks = [
            rank
            for name, sizes in runs.items()
            for rank in start(sizes[part], name=name, num_iterations=steps, **settings)
        ]
        for rank in ranks:
            code, printed = rank.wait()
            assert code == 0, printed
    alone, moved = (losses(ranks[0].run_dir.parent / f"{name}-0") for name in runs)
    assert len(alone) == 16
    assert moved == pytest.approx(alone, rel=1e-9 if sync == "exact" else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_get_the_bits_of_a_step_of_the_whole_table(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    whole = nn.Parameter(torch.randn(5 * 1024, 24, dtype=dtype))
    parts = nn.Parameter(whole.detach().clone())
    rates = {"lr": 0.3, "betas": (0.8, 0.995), "eps": 1e-10, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW([whole], fused=True, **rates)  # type: ignore[arg-type]
    pieces = [[slice(i, i + 64) for i in range(64 * rank, len(whole), 128)] for rank in range(2)]
    ranks = [RowAdamW(parts, rates, each) for each in pieces]
    for _ in range(5):
        active = torch.randperm(len(whole))[:700].sort().values
        gradients = torch.randn(700, 24, dtype=dtype)
        whole.grad = torch.zeros_like(whole)
        whole.grad[active] = gradients
        optimizer.step()
        for rank, rows in enumerate(ranks):
            here = active // 64 % 2 == rank
            rows.step_active(active[here] // 128 * 64 + active[here] % 64, gradients[here])
    assert torch.equal(whole, parts)
    for rank, rows in enumerate(ranks):
        own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces[rank]])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(rows.state[key], optimizer.state[whole][key][own])
        assert rows.state["step"] == 5


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_each_row_has_one_owner(world_size: int) -> None:
    config = GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16)
    owned: dict[str, list[int]] = {}
    for rank in range(world_size):
        model = GPT(config)
        optimizer = build_optimizer(model, **RATES)
        sync = make_sync("exact", CountingGroup(rank, world_size), model, optimizer)
        for name, parameter in model.named_parameters():
            rows = sync.owned_rows(name, rank)
            if rows is not None:
                owned.setdefault(name, []).extend(rows.tolist())
                assert sync.owner_of(name) is None
                assert len(rows) in (0, 64, 128, 192)  # 5 blocks: of 7 ranks some have none
                assert len(parameter) == 320
    if world_size == 1:
        assert owned == {}
    else:
        tables = {"transformer.wte.weight", "value_embeds.1.weight", "lm_head.weight"}
        assert owned.keys() == tables
        assert all(sorted(rows) == list(range(320)) for rows in owned.values())


@pytest.mark.parametrize("n_launch_ranks", [1, 2, 3, 4, 6, 64])
def test_ranks_own_blocks_in_turn_and_keep_them_when_others_are_lost(n_launch_ranks: int) -> None:
    everyone = owners_of_blocks(range(n_launch_ranks), n_launch_ranks, 512)
    assert everyone == [block % n_launch_ranks for block in range(512)]
    for lost in range(n_launch_ranks if n_launch_ranks > 1 else 0):
        launch_ranks = [number for number in range(n_launch_ranks) if number != lost]
        owners = owners_of_blocks(launch_ranks, n_launch_ranks, 512)
        assert all(
            launch_ranks[now] == number
            for now, number in zip(owners, everyone, strict=True)
            if number != lost
        )
        counts = [owners.count(rank) for rank in range(len(launch_ranks))]
        assert max(counts) - min(counts) <= 2


def test_an_election_changes_the_numbers_of_the_ranks_but_not_what_their_launch_ranks_own() -> None:
    launch_ranks = [2, 3, 1]  # the coordinator has launch rank 2, launch rank 0 is lost
    owners = [launch_ranks[rank] for rank in owners_of_blocks(launch_ranks, 4, 16)]
    assert owners == [2, 1, 2, 3, 3, 1, 2, 3, 1, 1, 2, 3, 2, 1, 2, 3]


def test_an_elastic_run_gives_its_ranks_their_launch_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three hosts coordinates, the first one is lost, and a host was added."""
    setup = ElasticSetup.__new__(ElasticSetup)
    setup.env = RankEnv(world_size=3, first_host=1)
    setup.membership, setup.watchdog, setup.run_status = Mock(), Mock(), Mock()
    monkeypatch.setattr(Collectives, "connect", lambda *arguments: None)
    members = tuple(Member(number, 1, Mock(endpoint="")) for number in (0, 1, 4))
    setup._connect_view(View(2, members))
    assert setup.group.launch_ranks == [1, 2, 4]
    assert setup.group.n_launch_ranks == 5


@pytest.mark.parametrize("sync", ["dense", "exact", "fast"])
def test_a_model_is_freed_with_its_sync_mode(sync: str) -> None:
    """An elastic run builds both again after each change of its members."""
    model = GPT(GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16))
    optimizer = build_optimizer(model, **RATES)
    mode = make_sync(sync, CountingGroup(0, 2), model, optimizer)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer, mode
    gc.collect()
    assert not any(reference() is not None for reference in references)
