"""How long work takes once it is warm, by a clock that work itself moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.model.config import GPTConfig
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import build_optimizer
from trainer.placement import microbenchmark


class Clock:
    """Work that takes `first` seconds when memory is new and `later` ones afterwards."""

    def __init__(self, first: float, later: float) -> None:
        self.now, self.times, self.first, self.later = 1000.0, 0, first, later

    def work(self) -> None:
        self.now += self.later if self.times else self.first
        self.times += 1


@pytest.fixture
def seconds_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], float]:
    def measure(clock: Clock) -> float:
        monkeypatch.setattr(microbenchmark.time, "monotonic", lambda: clock.now)
        return microbenchmark._seconds_of(clock.work)

    return measure


@pytest.mark.parametrize(
    ("first", "later", "times"),
    [
        (0.03, 0.01, 61),  # over 0.6 s
        (13.0, 9.0, 3),  # of long work two warm times are enough
        (39.0, 26.0, 2),  # of very long work one: two rows of depth 8 on a third of a core
    ],
)
def test_the_first_time_does_not_count(
    seconds_of: Callable[[Clock], float], first: float, later: float, times: int
) -> None:
    clock = Clock(first, later)
    assert seconds_of(clock) == pytest.approx(later)
    assert clock.times in (times, times + 1)  # a sum of hundredths may fall short of 0.6


def test_rows_of_a_slow_host_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples in the time of one: a disturbance of one sample would decide the batch split."""
    now, sizes = [0.0], []
    config = GPTConfig(sequence_len=8, vocab_size=32, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)
    model = GPT(config)
    optimizer = build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0)
    forward = model.forward

    def slow(tokens: torch.Tensor, *rest: torch.Tensor, **options: str) -> torch.Tensor:
        sizes.append(len(tokens))
        now[0] += 13.0 * len(tokens)
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(model, "forward", slow)
    monkeypatch.setattr(microbenchmark.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(microbenchmark, "_muon_seconds", lambda optimizer, model: 1.0)
    monkeypatch.setattr(optimizer, "step_adamw", lambda: now.__setitem__(0, now[0] + 1.0))
    speed = microbenchmark.measure_speed(model, optimizer, 2)
    assert (speed.row, sizes) == (13.0, [2, 1, 1])
    now[0], sizes[:] = 0.0, []
    monkeypatch.setattr(microbenchmark, "PATIENCE_SECONDS", 15.0)
    assert microbenchmark.measure_speed(model, optimizer, 2).row == 13.0
    assert sizes == [2], "there is no time for more"


def test_work_that_is_never_warm_in_time_is_measured_once(seconds_of: Callable[[Clock], float]) -> None:
    clock = Clock(60.0, 40.0)
    assert seconds_of(clock) == 60.0
    assert clock.times == 1
