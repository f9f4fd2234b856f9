"""The goodput of an elastic run that is disturbed."""

from pathlib import Path

import pytest

from benchmarks import elastic_lab, elastic_soak
from benchmarks.elastic import SETTINGS
from benchmarks.elastic_soak import block, goodput


def trained(at: float, first: int, count: int, seconds: float) -> dict[tuple[float, int], float]:
    """Steps one after another from a time on, each of some seconds."""
    return {(at + (number + 1) * seconds, first + number): seconds for number in range(count)}


def test_undisturbed_it_is_one() -> None:
    share, medians = goodput(trained(0, 1, 10, 1.0), [], 3, 0.0, 10.0)
    assert share == pytest.approx(1.0)
    assert medians == {3: 1.0}


def test_a_wait_for_a_lost_member_and_repeated_steps_lower_it() -> None:
    # Ten steps of three ranks; 4 s until they continue without one, from two steps before; ten slower steps.
    steps = trained(0, 1, 10, 1.0) | trained(14, 9, 10, 2.0)
    share, medians = goodput(steps, [(14.0, 2)], 3, 0.0, 34.0)
    assert medians == {2: 2.0, 3: 1.0}
    assert share == pytest.approx(18 / (14 / 1.0 + 20 / 2.0))


def test_a_host_that_is_away_costs_nothing_while_it_is_no_member() -> None:
    steps = trained(0, 1, 10, 1.0) | trained(10, 11, 5, 2.0)
    share, _ = goodput(steps, [(10.0, 2)], 3, 0.0, 20.0)
    assert share == pytest.approx(1.0)


def test_members_without_a_step_count_at_the_rate_of_the_nearest_number() -> None:
    share, _ = goodput(trained(0, 1, 10, 1.0), [(10.0, 2), (15.0, 1)], 3, 0.0, 20.0)
    assert share == pytest.approx(10 / 20)


def test_without_a_step_there_is_none() -> None:
    with pytest.raises(ValueError, match="no step"):
        goodput({}, [], 3, 0.0, 10.0)


def test_the_paragraph_has_the_figures() -> None:
    content = {
        "command": "x", "commit": "y", "date": "z", "seed": 1, "hosts": 3, "minutes": 30.4, "events": 2,
        "counts": {"freeze": 2}, "changes": 4, "steps": 1234, "repeated": 5, "goodput": 0.876,
        "step_seconds": {"2": 1.5, "3": 1.234}, "settings": SETTINGS,
    }  # fmt: skip
    text = block(content)
    assert "2 events (freeze 2) and 4 changes" in text
    assert "1,234 steps were trained, 5 of them again. The goodput is 88%" in text
    assert "1.50 s with 2, 1.23 s with 3 rank(s)" in text


def test_steps_that_were_trained_again_count_once_for_all_hosts() -> None:
    line = "The ranks continue after step {}, 4.2 s after they stopped; this rank has sent 1.2 MB. "
    line += "{} step(s) are trained again."
    logs = [
        line.format(90, 3),
        "\n".join([line.format(90, 4), line.format(200, 1)]),
        line.partition(" {} step(s)")[0],
    ]
    assert elastic_lab.repeated(logs) == 5


def test_what_was_planted_is_ended_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    def plant() -> None:
        did.append("plant")
        if len(did) == 2:
            raise SystemExit("podman fails")

    event = elastic_lab.Event("freeze", plant, lambda: did.append("fix"))
    monkeypatch.setattr(elastic_lab, "events", lambda lab, host: [event])
    monkeypatch.setattr(elastic_soak, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(elastic_soak, "members", lambda lab: 5)
    with pytest.raises(SystemExit, match="podman fails"):
        elastic_soak.disturb(elastic_lab.Lab("lab", 5, Path()), 1.0, 1, lambda line: None)
    assert did == ["plant", "plant", "fix"]


def test_the_time_without_a_step_is_that_between_completed_steps() -> None:
    steps = {(1.0, 1): 1.0, (2.0, 2): 1.0, (7.0, 3): 1.0, (8.5, 4): 1.5, (30.0, 5): 1.0}
    assert elastic_soak.idle(steps, 0.0, 10.0) == pytest.approx(0.4)


def test_a_change_that_several_hosts_have_written_counts_once() -> None:
    written = [(5.0, 2), (9.0, 3), (5.01, 2), (9.02, 3), (12.0, 2), (9.01, 3)]
    assert elastic_soak.distinct(written) == [(5.0, 2), (9.0, 3), (12.0, 2)]
