"""What the local mode sends with 2 bits and with top-k: its size, its error, and what becomes of the rest."""

from __future__ import annotations

import math

import pytest
import torch
from counted_bytes import predicted_bytes
from local_ranks import Rank, Room, batches_of, equal, look, resume, together
from torch import Tensor

from trainer.config import LOCAL_TOPK, ConfigError, RunConfig
from trainer.model.gpt import GPTConfig
from trainer.sync.compressor import SMALL, make_compressor
from trainer.sync.fragment import Outer
from trainer.sync.quantize import BLOCK, Quantizer
from trainer.sync.topk import CHUNK, TopK

D8 = GPTConfig.from_depth(8, vocab_size=32768, sequence_len=1024)
WINDOW_ROWS = 17000  # as in test_local.py
ROWS = (1, 3, 2)
TOPK = {"bits": 2, "topk": 320}  # about 0.22 MB a step at depth 8


def drawn(n: int, seed: int = 2) -> Tensor:
    """Normal values whose size differs from block to block."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=draw) * torch.logspace(-6, 2, n)


# -- packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, BLOCK, 5 * BLOCK + 3, 3 * CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("bits", [2, 4, 8, 32])
@pytest.mark.parametrize("topk", [0, 1, 64, 320, 1000, LOCAL_TOPK])
def test_what_is_unpacked_is_packed_to_the_same_bytes(n: int, bits: int, topk: int) -> None:
    compressor, values = make_compressor(bits, topk), drawn(n)
    packed = compressor.pack(values)
    assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    whole = math.ceil(n / CHUNK) * CHUNK if topk else math.ceil(n / BLOCK) * BLOCK if bits < 32 else n
    assert len(packed) == pytest.approx(whole * compressor.bytes_per_value, abs=BLOCK * bits / 8 + 4)
    found = compressor.unpack(packed, n, torch.float32)
    assert found.shape == values.shape
    assert found.isfinite().all()
    assert (found - values).square().sum() <= values.square().sum() * (1 + 1e-6)
    if bits < 32:
        assert torch.equal(compressor.unpack(packed, n, torch.float64), found.double())
    # A row of a table of bytes need not be aligned for the numbers in it.
    shifted = torch.cat([packed.new_zeros(1), packed])[1:]
    assert torch.equal(compressor.unpack(shifted, n, torch.float32), found)


def test_two_bits_have_the_least_squared_error() -> None:
    """Of normal values, four levels cannot do better than 0.1175 of the variance (Max 1960)."""
    values = torch.randn(1000 * BLOCK, generator=torch.Generator().manual_seed(1))
    quantizer = Quantizer(2)
    found = quantizer.unpack(quantizer.pack(values), len(values), values.dtype)
    assert 0.112 < (found - values).square().mean() < 0.119
    assert (found.sign() == values.sign()).all()
    assert all(len(block.unique()) <= 4 for block in found.split(BLOCK))


@pytest.mark.parametrize("value", [0.0, 1.5, -2e-20, 3e30])
def test_two_bits_of_equal_values(value: float) -> None:
    """One of the two levels has no value then; bfloat16 has 8 bits of precision."""
    values = torch.full((BLOCK,), value)
    found = Quantizer(2).unpack(Quantizer(2).pack(values), BLOCK, torch.float32)
    torch.testing.assert_close(found, values, rtol=2**-8, atol=0)


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    for compressor in (Quantizer(2), make_compressor(2, 320)):
        values = drawn(CHUNK)
        values[5] = math.nan
        assert compressor.unpack(compressor.pack(values), CHUNK, torch.float32).isnan().any()


@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 320, 512, 1023, LOCAL_TOPK, CHUNK - 1])
def test_the_largest_values_are_sent_from_their_positions(k: int) -> None:
    values = drawn(2 * CHUNK + 700, seed=k)
    compressor = TopK(k, Quantizer(32))
    found = compressor.unpack(compressor.pack(values), len(values), values.dtype)
    for chunk, sent in zip(values.split(CHUNK), found.split(CHUNK), strict=True):
        largest = chunk.abs().topk(min(k, len(chunk))).indices
        expected = torch.zeros_like(chunk).index_copy_(0, largest, chunk[largest])
        assert torch.equal(sent, expected)


def test_all_sets_of_positions_have_a_code_of_one_length() -> None:
    """The first, the last, evenly spread, and drawn positions: the Elias-Fano code is of fixed length."""
    compressor, lengths = TopK(16, Quantizer(32)), set()
    draw = torch.Generator().manual_seed(3)
    sets = [torch.arange(16), torch.arange(CHUNK - 16, CHUNK), torch.arange(16) * 256 + 255]
    sets += [torch.randperm(CHUNK, generator=draw)[:16] for _ in range(20)]
    for positions in sets:
        values = torch.zeros(CHUNK).index_fill_(0, positions, 1.0)
        packed = compressor.pack(values)
        lengths.add(len(packed))
        assert torch.equal(compressor.unpack(packed, CHUNK, values.dtype), values)
    assert len(lengths) == 1
    entropy = (math.lgamma(CHUNK + 1) - math.lgamma(17) - math.lgamma(CHUNK - 15)) / math.log(2) / 8
    assert entropy < lengths.pop() - 16 * 4 < 1.15 * entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_and_gates_are_sent_unchanged(dtype: torch.dtype) -> None:
    """Beside values a million times larger, in any order of the tensors."""
    sizes = [2, 5000, 48, SMALL, 1, 3 * SMALL, SMALL - 1]
    values = torch.cat([drawn(size, seed=size) * 1e6 ** (size > SMALL) for size in sizes]).to(dtype)
    for compressor in (make_compressor(2, 0, sizes), make_compressor(8, 320, sizes)):
        found = compressor.unpack(compressor.pack(values), len(values), dtype)
        for size, sent, value in zip(sizes, found.split(sizes), values.split(sizes), strict=True):
            assert torch.equal(sent, value) == (size < SMALL), size
    assert isinstance(make_compressor(8, 0, sizes), Quantizer), "the bytes of releases without 2 bits"


# -- error feedback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [{"bits": 8}, {"bits": 2}, TOPK], ids=str)
def test_sent_and_residual_are_the_difference_and_the_residual_before(compression: dict[str, int]) -> None:
    """In every round of every rank, and the mean of all ranks is that of what they sent."""
    outer, room = Outer(steps=2, delay=0, **compression), Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]
    seen: list[float] = []

    def work(rank: Rank) -> list[Tensor]:
        start = rank.sync._start_round

        def observed(fragment: object) -> None:
            rows = fragment.rows()
            take = (lambda values: values) if rows is None else (lambda values: values[rows])
            before = [take(o - p.detach()) for o, p in zip(fragment.outer, fragment.parameters, strict=True)]
            residual = [take(error).clone() for error in fragment.error]
            assert bool(residual) != outer.keeps_residual
            start(fragment)
            n = sum(value.numel() for value in before)
            fragment.sync_round.pending()
            packed = fragment.sync_round.table[rank.rank, :-8]
            fragment.sync_round = fragment.sync_round._replace(pending=lambda: None)
            sent = fragment.compressor.unpack(packed, n, torch.float32)
            left = fragment.error or [
                s - p.detach()
                for s, p in zip(fragment.sync_round.sent_parameters, fragment.parameters, strict=True)
            ]
            after = torch.cat([take(error).flatten() for error in left])
            expected = torch.cat([value.flatten() for value in before])
            if residual:
                expected += torch.cat([value.flatten() for value in residual])
            largest = max(float(p.detach().abs().max()) for p in fragment.parameters)
            rounding = 1e-6 * max(largest, float(expected.abs().max()))
            torch.testing.assert_close(sent + after, expected, rtol=0, atol=rounding)
            seen.append(float(after.norm() / expected.norm()))

        rank.sync._start_round = observed
        for step in range(6):
            rank.step(batches_of(step, ROWS))
        return rank.in_common()

    ends = together(ranks, work)
    assert all(equal(end, ends[0]) for end in ends)
    assert len(seen) == 3 * 3 * len(ranks[0].sync._fragments)
    assert max(seen) > (0.2 if outer.bits == 2 else 0.001), "nothing was rounded"


@pytest.mark.parametrize("topk", [0, 64, 320])
def test_what_is_not_sent_is_sent_later(topk: int) -> None:
    """Of a constant difference, the sum of all rounds falls behind by a bounded amount."""
    compressor, value = make_compressor(2, topk), drawn(CHUNK).abs().clamp_min(0.01)
    error, sent, behind = torch.zeros(CHUNK), torch.zeros(CHUNK), []
    for rounds in range(1, 401):
        packed = compressor.pack(value + error)
        out = compressor.unpack(packed, CHUNK, torch.float32)
        error = value + error - out
        sent += out
        if rounds in (200, 400):
            behind.append(float((sent - rounds * value).norm() / (rounds * value).norm()))
    assert behind[1] < 0.6 * behind[0]


def test_the_residual_of_top_k_stays_in_the_parameters() -> None:
    """After a round a rank is away from the outer parameters by what it has not sent; no buffer holds it."""
    outer, room = Outer(steps=2, delay=0, **TOPK), Room(2)
    ranks = [Rank(rank, 2, room, outer, torch.float32) for rank in range(2)]

    def work(rank: Rank) -> list[Tensor]:
        for step in range(2):
            rank.step(batches_of(step, (2, 2)))
        assert not equal(rank.own(), rank.in_common())
        with rank.sync.shared_parameters():
            state = rank.sync.rank_state()
        assert not any(name.startswith("error/") for name in state)
        rank.sync.finish()
        assert equal(rank.own(), rank.in_common())
        return rank.own()

    ends = together(ranks, work)
    assert equal(*ends)


@pytest.mark.parametrize("compression", [{"bits": 2}, TOPK], ids=str)
@pytest.mark.parametrize("owned", [(True, True), (True, True, False), (True, True, True, False)])
def test_another_number_of_ranks(owned: tuple[bool, ...], compression: dict[str, int]) -> None:
    """A rank that remains keeps its residual; that of a rank that has left is dropped, a new one has none."""
    outer, room = Outer(steps=2, delay=1, **compression), Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float32) for rank in range(3)]

    def train(rank: Rank) -> list[Tensor]:
        for step in range(5):
            rank.step(batches_of(step, ROWS))
        saved[rank.rank] = (look(rank), rank.optimizer.state_dict())
        return []

    saved: dict[int, tuple[object, ...]] = {}
    together(ranks, train)
    others = resume([saved[rank] for rank in range(3)], 5, outer, owned)
    for rank, has_own in zip(others, owned, strict=True):
        errors = [error for fragment in rank.sync._fragments for error in fragment.error]
        if has_own:
            assert equal(rank.own(), ranks[rank.rank].own())
            assert equal(errors, [e for fragment in ranks[rank.rank].sync._fragments for e in fragment.error])
            assert outer.keeps_residual or any(error.any() for error in errors)
        else:
            assert equal(rank.own(), rank.in_common())
            assert not any(error.any() for error in errors)

    def continue_run(rank: Rank) -> list[Tensor]:
        for step in range(5, 9):
            rank.step(batches_of(step, (1, 3, 2, 2)[: len(owned)]))
        rank.sync.finish()
        return rank.own()

    ends = together(others, continue_run)
    assert all(equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("topk", [0, 320])
def test_it_learns(topk: int) -> None:
    outer, room = Outer(steps=2, bits=2, topk=topk), Room(2)
    ranks = [Rank(rank, 2, room, outer, torch.float32) for rank in range(2)]
    batches = batches_of(0, (2, 2))

    def work(rank: Rank) -> list[Tensor]:
        losses = []
        for _ in range(8):
            rank.step(batches)
            with rank.sync.shared_parameters(), torch.no_grad():
                losses.append(rank.model(batches[0][:, :-1], batches[0][:, 1:]))
        return losses

    for losses in together(ranks, work):
        assert min(losses) < losses[0] - 2


# -- bytes and settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "most"), [({"bits": 2}, 0.8e6), (TOPK, 0.25e6)], ids=str)
def test_payload_of_a_step_at_depth_8(compression: dict[str, int], most: float) -> None:
    """Amortised over 30 steps; every rank sends it to each of the others."""
    for world_size in (2, 4):
        outer = Outer(**compression)
        sent = predicted_bytes("local", D8, world_size, world_size - 1, WINDOW_ROWS, outer)
        assert sent <= most * (world_size - 1)
    assert sent > 0.5 * most, "the target could be lower"


def test_settings_out_of_range_are_refused() -> None:
    for wrong, printed in (
        ({"local_bits": 3}, "local_bits is 3: it must be 2, 4, 8 or 32"),
        ({"local_topk": -1}, "local_topk is -1: it must lie between 0 and 2,048"),
        ({"local_topk": 2049}, "local_topk is 2049: it must lie between 0 and 2,048"),
    ):
        with pytest.raises(ConfigError, match=printed):
            RunConfig(**wrong)
    with pytest.raises(ValueError, match="bits is 3"):
        make_compressor(3)
    with pytest.raises(ValueError, match="k is 4096"):
        make_compressor(2, CHUNK)
    outer = Outer.of(RunConfig(sync="local", local_bits=2, local_topk=320))
    assert (outer.bits, outer.topk) == (2, 320)
