"""What a run writes down of itself: lines, cursors, names, plots, samples of the host, facts."""

from __future__ import annotations

import errno
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import TINY, train_here
from tracked_run import FACTS, until

from trainer.checkpoint.storage import TrainState
from trainer.config import RunConfig
from trainer.health.attempt import Attempt
from trainer.health.run_status import RunStatus
from trainer.host.facts import host_facts
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.run_plan import make_plan
from trainer.tracking import files
from trainer.tracking.files import Cursor, Facts, JsonLines, NewLines
from trainer.tracking.mlflow_run import FiguresRejectedError, is_server, reason, shown_uri
from trainer.tracking.names import METRICS, clean_key, metric_of
from trainer.tracking.plots import POINTS, make_plots, read_series
from trainer.tracking.reporter import Reporter, StepCost
from trainer.tracking.sender import Sender
from trainer.tracking.system import SystemSampler
from trainer.tracking.tracker import Tracker


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3, "time": 1}\n{"step": 3, "loss": 1, "time": 2}\n{"step": 2, "lo')
    JsonLines(path, last_step=2).write(2, {"loss": math.nan, "lr": 0.5}, time=3.0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 3, "time": 1},
        {"step": 2, "loss": None, "lr": 0.5, "time": 3.0},
    ]
    assert JsonLines(path).last_step == 2
    JsonLines(path, last_step=-1)
    assert path.read_text() == ""


def test_steps_that_are_trained_again_replace_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write(step, {"loss": 1.0}, time=0.0)
    tail = NewLines(path)
    tail.offset = list(tail)[-1][1]
    lines.drop_after(5)
    assert list(tail) == []
    lines.drop_after(3)
    for step in range(4, 7):
        lines.write(step, {"loss": 2.0}, time=0.0)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in found] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert [line["step"] for line, _ in tail] == [1, 2, 3, 4, 5, 6], "who follows the file reads it again"
    assert lines.last_step == 6


def test_on_a_full_disk_lines_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write(step, {"loss": 1.0}, time=0.0)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_whole", fails)
    lines.drop_after(3)
    lines.write(4, {"loss": 2.0}, time=0.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 4]


def test_lines_that_a_full_disk_kept_are_dropped_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        lines.write(step, {"loss": 1.0}, time=0.0)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files, "write_whole", fails)
        lines.drop_after(3)
    lines.drop_after(3)
    assert (lines.last_step, JsonLines(tmp_path / "metrics.jsonl").last_step) == (3, 3)


def test_refused_figures_do_not_count_as_sent(tmp_path: Path) -> None:
    class Refusing:
        def log(self, points: list[object]) -> None:
            raise FiguresRejectedError("the name is too long")

    FACTS.save(tmp_path)
    reports: list[dict[str, object]] = []
    sender = Sender(tmp_path, "http://127.0.0.1:9", 1.0, reports.append)
    sender._send_lines(Refusing(), [{"step": 1, "loss": 3.0, "time": 1.0}])  # type: ignore[arg-type]
    assert [report["sent"] for report in reports if "sent" in report] == [0]
    assert "refuses figures of step 1: the name is too long" in str(reports[0]["log"])


def test_facts_that_are_no_object_are_refused(tmp_path: Path) -> None:
    (tmp_path / files.FACTS).write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        Facts.load(tmp_path)


def test_a_host_that_returns_takes_what_its_last_step_lacks(tmp_path: Path) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    for folder, steps in ((own, 3), (others, 4)):
        folder.mkdir()
        tracker = Tracker(folder, 0, FACTS, "", print, is_main=False)
        for step in range(1, steps + 1):
            tracker.step(step, {"loss": 1.0})
            if (folder, step) == (others, 3):
                tracker.step(step, {"ranks": 2.0})  # while the other one was away
    lines = Tracker(others, 9, FACTS, "", print, is_main=False).lines_from(2)
    tracker = Tracker(own, 9, FACTS, "", print, is_main=False)
    tracker.take_lines(lines)
    found = [json.loads(line) for line in (own / files.METRICS).read_text().splitlines()]
    assert [(line["step"], line.get("ranks")) for line in found] == [
        (1, None), (2, None), (3, None), (3, 2.0), (4, None),
    ]  # fmt: skip
    assert tracker.last_step == 4


def test_new_lines_come_in_portions_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = NewLines(path)

    def read(count: int) -> list[tuple[int, int]]:
        """Step and end of the next lines, as the sender takes them."""
        return [(line["step"], end) for line, end in itertools.islice(tail, count)]

    assert read(10) == []
    lines = JsonLines(path)
    for step in range(5):
        lines.write(step, {"loss": 1.0}, time=0.0)
    with open(path, "a") as file:
        file.write('{"step": 5, "ti')
    assert [step for step, _ in read(3)] == [0, 1, 2]
    assert [step for step, _ in read(3)] == [0, 1, 2], "what was not taken comes again"
    tail.offset = read(3)[-1][1]
    assert [step for step, _ in read(3)] == [3, 4]
    tail.offset = read(3)[-1][1]
    assert read(3) == []
    JsonLines(path, last_step=1)  # another file in its place
    assert [step for step, _ in read(3)] == [0, 1]


def test_a_cursor_belongs_to_one_server_and_one_configuration(tmp_path: Path) -> None:
    cursor = Cursor.load(tmp_path, "http://a", FACTS)
    cursor.steps["train/step_loss"] = 7
    cursor.save(tmp_path)
    line = {"step": 7, "loss": 1.0, "val_bpb": 2, "time": 1.0, "none": None}
    assert Cursor.load(tmp_path, "http://a", FACTS).new_points(line) == {"val/bpb": 2.0}
    assert Cursor.load(tmp_path, "http://b", FACTS).steps == {}
    assert Cursor.load(tmp_path, "http://a", Facts("run", "d2")).steps == {}
    (tmp_path / files.CURSOR).write_text("{")
    assert Cursor.load(tmp_path, "http://a", FACTS).steps == {}


def test_names_and_addresses_are_made_fit() -> None:
    assert clean_key("host.0/a?ä=1") == "host.0/a_ä_1"
    assert clean_key("../../etc//passwd") == "etc/passwd"
    assert clean_key("") == "_"
    assert len(clean_key("x" * 999)) == 250
    assert shown_uri("https://me:secret@server:5000/") == "https://server:5000"
    assert is_server("http://10.0.0.2:5000")
    assert not any(map(is_server, ("localhost:5000", "mlruns", "sqlite:///x.db", "http://", "")))
    assert not is_server("http://[fd00::1:5000")
    assert shown_uri("http://me:secret@[fd00::1:5000") == "http://[fd00::1:5000"
    refused = RuntimeError("GET http://me:secret@server failed")
    assert reason(refused) == "GET http://server failed"
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert reason(refused) == "Connection refused"


def test_mlflow_takes_every_name_as_it_is() -> None:
    from mlflow.utils.validation import _validate_experiment_name, _validate_metric_name

    names = [metric_of(figure) for figure in (*METRICS, "rows.0", "rows.15", "system/load_1_minute")]
    assert len(set(names)) == len(names)
    for name in names:
        _validate_metric_name(name)
        assert clean_key(name) == name
    for experiment in (RunConfig().experiment, RunConfig(tracker_experiment="x" * 250).experiment):
        _validate_experiment_name(experiment)
    assert metric_of("of/a later release?") == "of/a later release_"


def test_every_figure_of_a_step_has_a_name_in_a_group(data_dir: Path, tmp_path: Path) -> None:
    train_here(data_dir, tmp_path, dtype="auto")
    lines = [line for _, line in files.read_lines(tmp_path / files.METRICS)]
    figures = {name for line in lines for name in line} - {"step", "time"}
    assert "mfu" in figures
    assert {name for name in figures if name not in METRICS and not name.startswith("rows.")} == set()


def test_figures_of_progress_are_nanochats(data_dir: Path, tmp_path: Path) -> None:
    """The average of the loss is nanochat's formula, written out; the totals add up over a resumed run."""
    train_here(data_dir, tmp_path, num_iterations=3)
    train_here(data_dir, tmp_path, num_iterations=6)
    read = [line for _, line in files.read_lines(tmp_path / files.METRICS)]
    lines = [line for line in read if "loss" in line]
    flops = float(Facts.load(tmp_path).params["plan.flops_per_token"])
    smooth = seconds = 0.0
    for step, line in enumerate(lines, 1):
        smooth = 0.9 * smooth + 0.1 * line["loss"]
        seconds += line["step_seconds"]
        assert line["smooth_loss"] == pytest.approx(smooth / (1 - 0.9**step))
        assert line["total_training_time"] == pytest.approx(seconds)
        assert line["total_training_flops"] == flops * TINY["total_batch_size"] * step
        assert line["epoch"] * 6 == pytest.approx(float(Facts.load(tmp_path).params["plan.epochs"]) * step)
    assert len(lines) == 6


def test_mfu_is_the_use_of_the_measured_gemm_rate(tmp_path: Path) -> None:
    config = RunConfig(depth=1, head_dim=32, sequence_len=32, total_batch_size=64)
    for rate, mfu in ((None, None), (1e9, 100 * 64 * 5e6 / 2.0 / 1e9)):
        status = RunStatus(tmp_path, RankEnv(), "run")
        reporter = Reporter(status, Attempt(tmp_path, RankEnv()), RunLogger(RankEnv()), routine=False)
        kept: list[dict[str, float]] = []
        reporter.tracker = SimpleNamespace(step=lambda step, figures, kept=kept: kept.append(figures))
        status.enter("optimizer")
        reporter.begin(make_plan(config, 300, 1), TrainState(), StepCost(5_000_000, rate, 100))
        reporter.step(3.0, 1.0, 0.1, 2.0, 0)
        assert kept[0].get("mfu") == (None if mfu is None else pytest.approx(mfu))


def test_a_run_whose_checkpoint_has_no_average_starts_with_its_loss(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, RankEnv(), "run")
    reporter = Reporter(status, Attempt(tmp_path, RankEnv()), RunLogger(RankEnv()), routine=False)
    reporter.train_state = TrainState.from_meta({"step": 500, "loss": 2.0})
    assert reporter._smooth_loss(2.5) == pytest.approx(2.5)
    assert reporter._smooth_loss(1.5) == pytest.approx(2.4)


def test_plots_are_pictures_of_bounded_size(tmp_path: Path) -> None:
    assert make_plots(tmp_path) == []
    lines = JsonLines(tmp_path / files.METRICS)
    for step in range(3 * POINTS):
        lines.write(step, {"loss": step, "tok_per_s": 1.0, "data_s": 0.1, "sync_s": 0.2}, time=0.0)
    lines.write(step, {"val_bpb": 1.5, "val_loss": 4.0}, time=0.0)
    shown, values = read_series(tmp_path / files.METRICS)["loss"]
    assert shown == values == list(range(0, 3 * POINTS, 3))
    made = make_plots(tmp_path)
    assert sorted(path.name for path in made) == ["loss.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in made)
    before = [path.stat().st_mtime_ns for path in made]
    assert [path.stat().st_mtime_ns for path in make_plots(tmp_path)] == before, "nothing new, nothing drawn"


def test_the_host_is_sampled(tmp_path: Path) -> None:
    sampler = SystemSampler(tmp_path, every_seconds=0.05)
    path = tmp_path / files.SYSTEM
    until(lambda: len(path.read_text().splitlines()) >= 2, "it takes samples")
    sampler.close()
    taken = [json.loads(line) for line in path.read_text().splitlines()]
    again = SystemSampler(tmp_path)
    again.close()  # the last sample is taken at the end
    taken.append(json.loads(path.read_text().splitlines()[-1]))
    assert [line["step"] for line in taken] == list(range(len(taken))), "an attempt continues counting"
    last = taken[-1]
    assert last["system/process_memory_megabytes"] == pytest.approx(
        psutil.Process().memory_info().rss / 1e6, rel=0.2
    )
    assert last["system/disk_available_megabytes"] > 0
    assert 0 <= last["system/cpu_utilization_percentage"] <= 100


def test_facts_of_a_host_are_strings() -> None:
    facts = host_facts()
    assert {"hostname", "system", "machine", "cpu", "cores", "memory", "python", "torch"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
