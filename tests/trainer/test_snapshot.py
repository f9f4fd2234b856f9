"""The state of a run from the parts that its ranks have sent to a holder."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

from trainer.distributed.process_group import Channel, Collectives, PeerLost
from trainer.distributed.tensor_format import formats_of
from trainer.elastic.snapshot import Copy, Layout, Snapshots, state_of
from trainer.host.rank_env import RankEnv

ROWS = [torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([2])]


def part_of(rank: int, holder: int) -> dict[str, Tensor]:
    """The part of a rank: rows of the table with its own number."""
    count = len(ROWS[rank])
    part = {
        "model/table": torch.full((count, 2), float(rank)),
        f"matrix{rank}/moment": torch.tensor([float(rank)]),
        "table/moment": torch.full((count, 2), 10.0 + rank),
        "table/step": torch.tensor(3),
    }
    return part | (
        {"model/scale": torch.tensor([7.0]), "scale/step": torch.tensor(3)} if rank == holder else {}
    )


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_each_row_is_that_of_its_owner_on_every_holder(holder: int) -> None:
    parts = [part_of(rank, holder) for rank in range(3)]
    flat = [torch.cat([t.reshape(-1).view(torch.uint8) for t in part.values()]) for part in parts]
    layout = Layout([formats_of(part) for part in parts], {"model/table": ROWS, "table": ROWS})
    copy = Copy({"step": 9}, holder, layout, flat)
    state = state_of(copy)
    assert state is not None
    assert state.step == copy.step == 9
    assert state.model["table"][:, 0].tolist() == [0, 1, 2, 0, 1]
    assert state.model["scale"].tolist() == [7]
    assert state.optim["table"]["moment"][:, 0].tolist() == [10, 11, 12, 10, 11]
    assert [state.optim[f"matrix{rank}"]["moment"].item() for rank in range(3)] == [0, 1, 2]
    assert int(state.optim["scale"]["step"]) == int(state.optim["table"]["step"]) == 3
    assert list(state.optim) == sorted(state.optim), "the holders write the same file"


def test_a_state_that_a_thread_assembles_is_assembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"model/scale": torch.tensor([7.0])}
    flat = part["model/scale"].view(torch.uint8)
    copy, calls, assemble = Copy({"step": 9}, 0, Layout([formats_of(part)], {}), [flat]), [], Copy.assemble
    monkeypatch.setattr(Copy, "assemble", lambda self: calls.append(self) or assemble(self))
    future = copy.begin_assembly()
    assert copy.begin_assembly() is future
    assert copy.take_state() is future.result()
    assert len(calls) == 1
    again = state_of(copy)
    assert again is not None
    assert again is not future.result(), "the caller of take_state may have changed it"
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("pause", "seconds", "interval", "calm"),
    [(0.0, 0.0, 2.0, 2.0), (0.05, 0.1, 10.0, 30.0), (0.01, 1.0, 20.0, 60.0), (0.3, 12.0, 60.0, 60.0)],
    ids=["nothing is measured", "the pause", "the transfer", "a large model"],
)
def test_a_copy_is_due_as_often_as_it_costs_little(
    pause: float, seconds: float, interval: float, calm: float
) -> None:
    copies = Snapshots(Collectives(RankEnv(), []), None)
    copies._later_pause, copies.seconds = pause, seconds
    assert copies.interval(is_calm=False) == pytest.approx(interval)
    assert copies.interval(is_calm=True) == pytest.approx(calm)
    copies._arrival = 15.0
    assert copies.interval(is_calm=True) == pytest.approx(min(calm, 45.0)), "the next one is there after 60 s"
    copies._arrival = 40.0
    slow = 80.0 if seconds == 12.0 else calm
    assert copies.interval(is_calm=True) == pytest.approx(slow), "a slow link is free half of the time"


def test_no_copy_is_sent_over_a_group_that_was_abandoned() -> None:
    group = Collectives(RankEnv(), [])
    channel = Channel(group, object())
    group.abandon()
    with pytest.raises(PeerLost, match="members of the run have changed"):
        channel.exchange(torch.empty(0), [], [])


def test_a_copy_gives_way_to_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Collectives(RankEnv(), [])
    copies, passed = Snapshots(group, None), threading.Event()
    monkeypatch.setattr(copies._channel, "exchange", lambda *words: passed.set() or torch.empty(0))
    part = torch.zeros(8, dtype=torch.uint8)

    def send() -> threading.Thread:
        passed.clear()
        thread = threading.Thread(target=copies._send, args=(part, [8], None))
        thread.start()
        return thread

    group.is_waiting = True
    thread = send()
    assert not passed.wait(0.2), "the training thread uses the network"
    group.is_waiting = False
    assert passed.wait(10), "it computes"
    thread.join()
    assert copies.seconds < 0.1, "the wait is not counted"

    group.is_waiting = True
    copies._thread = thread = send()
    copies.finish()  # the training thread itself waits for the copy
    assert passed.is_set()


def test_memory_for_the_next_copy_is_no_third_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the members the parts have other sizes: the old ones go before new ones are made."""
    before = torch.zeros(4, dtype=torch.uint8)
    old, made = weakref.ref(before), []
    copies = Snapshots(Collectives(RankEnv(), []), Copy({}, 0, Layout([b"[]"], {}), [before]))
    del before

    def ones_like(part: Tensor) -> Tensor:
        made.append(old() is None)
        return part.clone()

    monkeypatch.setattr(torch, "ones_like", ones_like)
    whole = torch.zeros(8, dtype=torch.uint8)
    copies._send(whole[:0], [0], Copy({}, 0, Layout([b"[]"], {}), [whole]))
    assert made == [True]
    copies._send(whole[:0], [0], Copy({}, 0, Layout([b"[]"], {}), [whole.clone()]))
    assert made == [True], "the memory of the last copy but one is used again"


def test_the_memory_of_a_copy_that_is_read_is_not_used_again() -> None:
    copies, layout = Snapshots(Collectives(RankEnv(), []), None), Layout([b"[]"], {})
    for number in (1, 2, 3):
        part = copies._pack("part 0", {"tensor": torch.full((4,), number, dtype=torch.uint8)})
        copies._send(part[:0], [0], Copy({"step": number}, 0, layout, [part]))
        if number == 1:
            lent = copies.lend()
    assert lent.parts[0].tolist() == [1] * 4
    used_again = copies._spare["part 0"]
    assert used_again.tolist() == [2] * 4, "that of a copy that nobody reads is"
