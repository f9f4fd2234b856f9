"""A run's log: for a person with the rank in front, for a program as JSON, always whole and at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, flags

from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv

FIELDS = {"time", "rank", "host", "level", "event", "message"}
PLACE = RankEnv(rank=1, world_size=2, host="b")
# What a training does when nobody has made a sentence for its error, or when it dies in native code.
CRASHES = """
import faulthandler, sys, warnings
import trainer.train
from trainer.__main__ import main

def crash(*_):
    print("a library's word", file=sys.stderr)
    warnings.warn("an old function")
    if {native}:
        faulthandler._sigsegv()
    raise KeyError("grad")

trainer.train.Trainer.run = crash
code = main({arguments!r})
"""


def printed(text: str) -> list[dict[str, Any]]:
    """Every line of a log of JSON."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line.keys() >= FIELDS for line in lines)
    return lines


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "NANOFLEET_HOST": "a"}


def arguments(data_dir: Path, run_dir: Path, *more: str, **settings: Any) -> list[str]:
    given = flags({**TINY, "num_iterations": 3, **settings})
    return ["train", "--data-dir", str(data_dir), "--run-dir", str(run_dir), "--run-id", "r", *given, *more]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )


def test_for_a_person_every_line_carries_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    RunLogger(PLACE).info("two\nlines", extra=fields("step", loss=1.0))
    assert capsys.readouterr().out == "[rank 1] two\n[rank 1] lines\n"


def test_for_a_program_figures_are_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLogger(PLACE, as_json=True)
    odd = {"bad": float("nan"), "path": Path("/x"), "shares": (1, 2), "rank": 7}
    log.info("step 3: nä\nmore", extra=fields("step", step=3, loss=1.5, **odd))
    out = capsys.readouterr().out
    assert out.isascii(), "any locale can write it"
    (line,) = printed(out)
    assert (line.pop("time") > 0, line) == (
        True,
        {
            "rank": 1, "host": "b", "level": "info", "event": "step", "message": "step 3: nä\nmore",
            "step": 3, "loss": 1.5, "bad": None, "path": "/x", "shares": [1, 2],
        },
    )  # fmt: skip


def test_a_traceback_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        {}["x"]
    except KeyError as caught:
        error = caught
    RunLogger(PLACE).failure(error)
    human = capsys.readouterr().err
    assert human.startswith("Traceback")
    assert human.endswith("KeyError: 'x'\n")
    RunLogger(PLACE, as_json=True).failure(error)
    (line,) = printed(capsys.readouterr().out)
    assert (line["event"], line["level"], line["traceback"]) == ("traceback", "error", human)


def test_an_end_is_reported_with_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    RunLogger(PLACE).ended("final", "They differ.", "  field  a\n  seed   1")
    assert capsys.readouterr().out.splitlines() == [
        "[rank 1] final: They differ.",
        "[rank 1]   field  a",
        "[rank 1]   seed   1",
    ]
    log = RunLogger(PLACE, as_json=True)
    for outcome in ("finished", "stopped", "retryable", "final"):
        log.ended(outcome, "Why.")
    lines = printed(capsys.readouterr().out)
    assert [line["level"] for line in lines] == ["info", "info", "error", "error"]
    assert [line["outcome"] for line in lines] == ["finished", "stopped", "retryable", "final"]
    assert {(line["event"], line["reason"]) for line in lines} == {("outcome", "Why.")}


def test_a_reader_that_has_left_does_not_end_the_run() -> None:
    code = (
        "import sys; from trainer.host.logger import *; from trainer.host.rank_env import RankEnv\n"
        "set_up_streams(); log = RunLogger(RankEnv())\n"
        "[log.info('x' * 9999) for _ in range(50)]; print('alive', file=sys.stderr); flush_streams()"
    )
    command = f"{sys.executable} -c {json.dumps(code)} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment())
    assert "alive" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_no_locale_stops_it(locale: str) -> None:
    code = (
        "import sys; from trainer.host.logger import *; from trainer.host.rank_env import RankEnv\n"
        "set_up_streams(); RunLogger(RankEnv()).info('\\u00b7 \\u20ac \\udc80')\n"
        "print('\\udc80', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**environment(), "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"[rank 0] \\xb7 \\u20ac \\udc80\n"


@pytest.mark.processes
def test_a_whole_run_as_json(data_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", *arguments(data_dir, tmp_path / "run", "--json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    lines = printed(done.stdout)
    assert {(line["rank"], line["host"], line["level"]) for line in lines} == {(0, "a", "info")}
    assert lines[0]["message"].startswith("Importing torch"), "which may take a minute"
    assert (lines[-1]["event"], lines[-1]["outcome"]) == ("outcome", "finished")
    steps = [line for line in lines if line["event"] == "step"]
    assert (steps[0]["step"], steps[-1]["step"]) == (1, 3)
    figures = {"loss", "lr_multiplier", "tok_per_s", "step_seconds", "forward_s", "sync_s", "bytes_sent"}
    assert all(figures <= line.keys() and line["loss"] > 0 for line in steps)
    assert f"loss {steps[-1]['loss']:.4f}" in steps[-1]["message"]
    (evaluation,) = (line for line in lines if line["event"] == "evaluation")
    assert (evaluation["step"], evaluation["val_bpb"] > 0) == (3, True)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


@pytest.mark.processes
def test_lines_come_at_once_through_a_pipe(data_dir: Path, tmp_path: Path) -> None:
    """What a reader behind `| cat` sees when the run is still far from its end."""
    wanted = arguments(data_dir, tmp_path / "run", num_iterations=2000, eval_every=0)
    command = " ".join([sys.executable, "-m", "trainer", *wanted])
    shell = subprocess.Popen(
        ["bash", "-c", f"exec {command} > >(cat)"], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert shell.stdout is not None
    first = next(line for line in shell.stdout if "step 1/2000" in line)
    beat = json.loads((tmp_path / "run" / "heartbeat-0.json").read_text())
    shell.terminate()
    rest = shell.stdout.read()
    shell.wait(120)
    shell.stdout.close()
    assert first.startswith("[rank 0] step 1/2000 loss ")
    assert beat["step"] < 1000, "the line came while the run continued"
    assert rest.splitlines()[-1].startswith("[rank 0] stopped: Asked to end by SIGTERM"), "to the last word"


@pytest.mark.parametrize(("native", "more"), [(True, ()), (False, ("--json",))])
def test_a_crash_is_complete(native: bool, more: Sequence[str], tmp_path: Path) -> None:
    done = run(CRASHES.format(native=native, arguments=arguments(tmp_path, tmp_path / "run", *more)))
    assert "a library's word\n" in done.stderr
    assert "UserWarning: an old function" in done.stderr
    if native:
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "in crash" in done.stderr
        return
    lines = printed(done.stdout)
    assert [line["event"] for line in lines] == ["traceback", "outcome"]
    assert "in crash" in lines[0]["traceback"]
    assert lines[0]["message"] == "KeyError: 'grad'"
    assert (lines[1]["level"], lines[1]["outcome"]) == ("error", "final")
