"""What elastic=true costs a run to which nothing happens, from the times of its runs."""

from benchmarks import elastic_cost
from benchmarks.elastic import SETTINGS


def test_each_round_is_compared_with_its_own_elastic_false() -> None:
    off, on, bare = elastic_cost.CASES
    seconds = {off: [1.0, 2.0], on: [1.01, 2.02], bare: [1.0, 1.99]}
    assert elastic_cost.ratios(seconds) == {on: [1.01, 1.01], bare: [1.0, 0.995]}


def test_the_documentation_has_both_ratios_in_percent() -> None:
    off, on, bare = elastic_cost.CASES
    content = {
        "command": "python -m benchmarks.elastic_cost", "commit": "abc", "date": "2026-11-28",
        "machine": "a CPU", "hosts": 3, "steps": 100, "rounds": 2, "settings": SETTINGS,
        "seconds": {off: [0.5, 0.5]}, "medians": {on: 1.0123, bare: 0.9991},
    }  # fmt: skip
    text = elastic_cost.block(content)
    assert "steps of 0.50 s" in text
    assert "by +1.2 %; without the copies of the state it changed by -0.1 %" in text
