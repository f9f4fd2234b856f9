"""What ranks in the mode local keep, and what they send each other, when the members of a run change."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from local_ranks import Rank, RankThread, Room, batches_of, equal, together
from torch import Tensor

from trainer.distributed.process_group import PeerLost, Pending
from trainer.sync.fragment import Fragment, Outer

ROWS = (2, 1, 1)
OUTERS = [Outer(steps=6, delay=2), Outer(steps=6, delay=2, bits=2), Outer(steps=6, delay=2, topk=64)]


def ranks_after(steps: int, outer: Outer) -> list[Rank]:
    """Three ranks after so many steps; every fragment has a round in flight at some of them."""
    room = Room(3)
    ranks = [Rank(rank, 3, room, outer, torch.float64) for rank in range(3)]

    def work(rank: Rank) -> list[Tensor]:
        for step in range(steps):
            rank.step(batches_of(step, ROWS))
        return []

    together(ranks, work)
    return ranks


def regroup(
    ranks: list[Rank],
    step: int,
    new: tuple[int, ...] = (),
    sent: list[int] | None = None,
    last: int = 1000,
) -> int:
    """Let `ranks` be the members from now on; returns the step from which all of them continue.

    step: of rank 0. new: those that have just joined, by their new number. sent: gets the number of values
    of each tensor that a rank receives. last: the highest number that is returned.
    """

    class Counted(RankThread):
        def start_exchange(
            self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], largest: int = 0
        ) -> tuple[Tensor, Pending]:
            if sent is not None and sum(receives):
                sent.append(sum(receives))
            return super().start_exchange(tensor, sends, receives, largest)

    room = Room(len(ranks))
    for number, rank in enumerate(ranks):
        rank.rank = number

    def work(rank: Rank) -> list[Tensor]:
        found = rank.sync.regroup(Counted(rank.rank, len(ranks), room), step, rank.rank in new, last)
        return [torch.tensor(found)]

    steps = {int(found) for (found,) in together(ranks, work)}
    assert len(steps) == 1
    return steps.pop()


def continue_run(ranks: list[Rank], first: int, steps: int) -> None:
    """Train, and check after each step that the shared parameters are the same to the last bit."""
    rows = ROWS[: len(ranks)]

    def work(rank: Rank) -> list[Tensor]:
        seen = []
        for step in range(first, first + steps):
            rank.step(batches_of(step, rows))
            seen += rank.in_common()
        return seen

    first_seen, *others = together(ranks, work)
    assert all(equal(first_seen, seen) for seen in others)


def in_flight(rank: Rank) -> list[Fragment]:
    return [fragment for fragment in rank.sync._fragments if fragment.sync_round]


def owed(fragment: Fragment) -> list[Tensor]:
    """What a rank has learned and not shared yet: its change, and the residual of rounding."""
    pairs = zip(fragment.outer, fragment.parameters, strict=True)
    changes = [outer - p.detach() for outer, p in pairs]
    return [change + fragment.error[i] if fragment.error else change for i, change in enumerate(changes)]


@pytest.mark.parametrize("outer", OUTERS)
def test_a_round_that_nobody_has_completed_is_taken_back_and_started_again(outer: Outer) -> None:
    before, ranks = ranks_after(5, outer)[:2], ranks_after(6, outer)[:2]
    shared = ranks[0].in_common()
    (names,) = (f.names for f in in_flight(ranks[0]) if f.synced_at == 6)
    regroup(ranks, 6)
    for old, rank in zip(before, ranks, strict=True):
        assert not in_flight(rank)
        assert equal(rank.in_common(), shared)  # no outer step
        old.train(batches_of(5, ROWS))  # until the round is started
        then, now = (next(f for f in each.sync._fragments if f.names == names) for each in (old, rank))
        assert (now.is_due, now.tokens) == (True, then.tokens)
        assert now.decay == pytest.approx(then.decay, rel=1e-14)
        for expected, found in zip(owed(then), owed(now), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    continue_run(ranks, 6, 8)
    (again,) = (f for f in ranks[0].sync._fragments if f.names == names)
    assert again.completed > 6


@pytest.mark.processes
@pytest.mark.parametrize("outer", OUTERS)
def test_a_round_that_one_rank_has_completed_is_completed_on_all(outer: Outer) -> None:
    undisturbed, ranks = ranks_after(9, outer), ranks_after(8, outer)
    late = ranks[1]

    def lost() -> None:
        raise PeerLost("Lost rank 2.")

    def work(rank: Rank) -> list[Tensor]:
        rank.train(batches_of(8, ROWS))
        if rank is late:
            for fragment in in_flight(rank):
                assert fragment.sync_round
                arrive = fragment.sync_round.pending
                fragment.sync_round = fragment.sync_round._replace(
                    pending=lambda arrive=arrive: (arrive(), lost())
                )
            with pytest.raises(PeerLost):
                rank.sync.broadcast()
        else:
            rank.sync.broadcast()
        return []

    due = [f for f in in_flight(late) if f.sync_round and f.sync_round.started_at + outer.delay <= 9]
    assert len(due) == 1
    together(ranks, work)
    assert in_flight(late)
    assert not equal(late.in_common(), ranks[0].in_common())
    regroup(ranks[:2], 9)
    for rank, expected in zip(ranks[:2], undisturbed[:2], strict=True):
        assert equal(rank.in_common(), expected.in_common())
        pairs = zip(rank.sync._fragments, expected.sync._fragments, strict=True)
        for now, then in pairs:
            if now.names == due[0].names:  # other rounds were taken back
                assert equal(now.parameters, then.parameters)
    continue_run(ranks[:2], 9, 8)


@pytest.mark.processes
@pytest.mark.parametrize("outer", OUTERS)
def test_a_rank_that_joins_starts_from_the_shared_parameters(outer: Outer) -> None:
    ranks = ranks_after(8, outer)[:2]
    own = [rank.own() for rank in ranks]
    new = Rank(2, 3, Room(3), outer, torch.float64)
    ranks.append(new)
    regroup(ranks, 8, new=(2,))
    new.optimizer.load_state_dict(copy.deepcopy(ranks[0].optimizer.state_dict()))
    assert equal(new.own(), ranks[0].in_common())
    assert equal(new.in_common(), ranks[0].in_common())
    assert all(map(equal, (rank.own() for rank in ranks[:2]), own))
    continue_run(ranks, 8, 14)


@pytest.mark.processes
@pytest.mark.parametrize("stale", [0, 2])
@pytest.mark.parametrize("missed", [1, 2, 5])
@pytest.mark.parametrize("left_at", [7, 8])
def test_a_rank_that_has_missed_steps_takes_part_again(stale: int, missed: int, left_at: int) -> None:
    """Also if it is rank 0: after an election it may be one that the others had left behind."""
    ranks = ranks_after(left_at, OUTERS[0])
    missing = ranks.pop(stale)
    assert regroup(ranks, left_at) == left_at
    continue_run(ranks, left_at, missed)
    ranks.insert(stale, missing)
    now = left_at + missed
    # The last step of the others may be one that nobody has completed.
    expected = now - 1 if stale == 0 else now
    assert regroup(ranks, left_at if stale == 0 else now) == expected
    assert equal(missing.in_common(), ranks[1].in_common())
    continue_run(ranks, expected, 8)


def test_the_last_step_is_trained_again() -> None:
    """The run is evaluated and saved after it."""
    ranks = ranks_after(8, OUTERS[0])[:2]
    assert regroup(ranks, 8, last=7) == 7
    assert regroup(ranks, 7, last=7) == 7
    continue_run(ranks, 7, 1)


def test_rounds_of_the_same_step_that_differ_are_made_equal() -> None:
    """Without a delay a rank may complete a round that the others take back and start again at this step."""
    ranks = ranks_after(8, Outer(steps=6, delay=0))
    alone, ranks = ranks[2], ranks[:2]
    for rank in ranks:
        for fragment in rank.sync._fragments:
            if fragment.completed == 8:  # as if it had been completed without the third rank
                fragment.outer[0].add_(1)
                fragment.checksum += 1
    assert not equal(alone.in_common(), ranks[0].in_common())
    regroup([*ranks, alone], 8)
    assert equal(alone.in_common(), ranks[0].in_common())
    continue_run([*ranks, alone], 8, 3)


@pytest.mark.processes
@pytest.mark.parametrize("outer", OUTERS)
def test_a_rank_that_has_fetched_the_state_needs_only_what_has_changed_since(outer: Outer) -> None:
    ranks = ranks_after(8, outer)[:2]
    regroup(ranks, 8)
    continue_run(ranks, 8, 2)
    new = Rank(2, 3, Room(3), outer, torch.float64)
    with ranks[0].sync.shared_parameters():  # as in an evaluation
        swapped = list(ranks[0].sync.copy_outer({}))
    new.sync.load_outer(ranks[0].sync.copy_outer({}))
    assert equal(
        [t for state in swapped for t in state.values()],
        [t for state in ranks[0].sync.copy_outer({}) for t in state.values()],
    )
    new.optimizer.load_state_dict(copy.deepcopy(ranks[0].optimizer.state_dict()))
    assert equal(new.own(), ranks[0].in_common())
    continue_run(ranks, 10, 3)
    ranks.append(new)
    sent: list[int] = []
    regroup(ranks, 13, sent=sent)
    everything = 2 * sum(p.numel() for p in new.model.parameters())  # outer, momentum
    assert 0 < sum(sent) < 0.9 * everything
    assert equal(new.in_common(), ranks[0].in_common())
    continue_run(ranks, 13, 10)


def test_fragments_that_have_changed_are_fetched_again() -> None:
    ranks = ranks_after(8, OUTERS[0])[:2]
    new = Rank(2, 3, Room(3), OUTERS[0], torch.float64)
    regroup(ranks, 8)
    known: dict[int, tuple[int, int]] = {}
    new.sync.load_outer(ranks[0].sync.copy_outer(known))
    continue_run(ranks, 8, 3)
    changed = [f for f in ranks[0].sync._fragments if f.completed > 8]
    again = list(ranks[0].sync.copy_outer(known))
    assert 0 < len(again) == len(changed) < len(known)
    new.sync.load_outer(again)
    assert list(ranks[0].sync.copy_outer(known)) == []
    assert equal(new.in_common(), ranks[0].in_common())
    ranks.append(new)
    sent: list[int] = []
    regroup(ranks, 11, sent=sent)
    rows = len(new.model.transformer.wte.weight)
    assert set(sent) <= {rows}, "only the steps at which rows were active"
    continue_run(ranks, 11, 8)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_step_of_an_outer_step_is_known_before(delay: int) -> None:
    ranks = ranks_after(1, Outer(steps=6, delay=delay))
    expected, found = [], []
    for step in range(2, 16):
        before = [f.completed for f in ranks[0].sync._fragments]
        expected.append(ranks[0].sync.takes_outer_step(step))
        continue_run(ranks, step - 1, 1)
        found.append([f.completed for f in ranks[0].sync._fragments] != before)
        assert not ranks[0].sync.takes_outer_step(step), "it has been taken"
    assert expected == found
    assert {True, False} == set(found)


@pytest.mark.parametrize("outer", OUTERS)
def test_a_checkpoint_without_the_rounds_in_flight_is_continued(outer: Outer) -> None:
    ranks = ranks_after(8, outer)
    assert in_flight(ranks[0])
    found = [copy.deepcopy(rank.sync.state_without_rounds()) for rank in ranks]
    with ranks[0].sync.shared_parameters():
        shared = copy.deepcopy(ranks[0].model.state_dict())
    room = Room(2)
    others = [Rank(rank, 2, room, outer, torch.float64) for rank in range(2)]
    for rank in others:
        rank.model.load_state_dict(shared)
        rank.sync.load(8, found[1 + rank.rank], {})
        assert equal(rank.in_common(), ranks[0].in_common())
    continue_run(others, 8, 10)


def test_a_change_that_fails_halfway_is_repeated() -> None:
    """The rank that joins is lost while it receives; the others then continue without it."""
    outer = OUTERS[0]
    ranks = ranks_after(8, outer)[:2]
    shared = ranks[0].in_common()
    room = Room(3)
    sent = 0

    class Lossy(RankThread):
        def start_exchange(self, *args: object) -> tuple[Tensor, Pending]:
            nonlocal sent
            sent += 1
            raise PeerLost("Lost rank 2.")

    new = Rank(2, 3, Room(3), outer, torch.float64)

    def work(rank: Rank) -> list[Tensor]:
        with pytest.raises(PeerLost):
            rank.sync.regroup(Lossy(rank.rank, 3, room), 8, rank is new, 1000)
        return []

    together([*ranks, new], work)
    assert sent == 3
    regroup(ranks, 8)
    assert equal(ranks[0].in_common(), shared)
    continue_run(ranks, 8, 10)
