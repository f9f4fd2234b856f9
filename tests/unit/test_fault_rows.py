"""What docs/faults.md says a fault cost: from planting it to the next step, and the steps done again."""

import pytest
from faults.messages import Pause


def test_a_resumed_run_is_measured_from_the_fault_to_its_first_step() -> None:
    """The host came back at 160; seconds count from the fault at 100, not from there."""
    times = {step: float(step) for step in range(91, 101)} | {91: 170.0, 92: 171.0}
    assert Pause.of(times, planted=100.0, made=100, resumed=90) == Pause(70.0, 10)


def test_a_run_that_waited_is_measured_to_the_step_after_its_longest_wait() -> None:
    """A step was under way when the link went down at 10.5 and came in at once."""
    times = {9: 9.0, 10: 10.0, 11: 10.7, 12: 31.2, 13: 32.0}
    pause = Pause.of(times, planted=10.5, made=10, resumed=None)
    assert pause.seconds == pytest.approx(20.7)
    assert pause.repeated == 0


def test_a_run_that_resumed_before_its_first_checkpoint_repeats_all_steps() -> None:
    assert Pause.of({1: 50.0}, planted=20.0, made=7, resumed=0) == Pause(30.0, 7)
