"""logs.yml and fetch.yml: the journal of a host, lines merged by time, copies compared with their sums."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_logs as logs
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import summary
from ansible_collections.nanofleet.fleet.plugins.modules import run_files, run_log
from role_files import call
from run_states import ROOT, state


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journalctl that selects lines of a file as systemd 252 does; a systemctl that knows no unit."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "journalctl").write_text(
        f"#!/bin/sh\necho $* > {tmp_path}/asked\n"
        "lines=$(echo $* | sed -n 's/.*--lines=\\([0-9]*\\).*/\\1/p')\n"
        f'case "$*" in\n*--reverse*) tac {tmp_path}/journal | head -n $lines ;;\n'
        f"*--since*) head -n $lines {tmp_path}/journal ;;\n*) cat {tmp_path}/journal ;;\nesac\n"
    )
    (tools / "systemctl").write_text("#!/bin/sh\necho ActiveState=inactive\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "journal").touch()
    return tmp_path


def entries(*messages: Any) -> str:
    return "".join(
        json.dumps({"MESSAGE": message, "__REALTIME_TIMESTAMP": str(at * 1_000_000), "__CURSOR": f"c{at}"})
        + "\n"
        for at, message in enumerate(messages, 1)
    )


def test_the_journal_is_read_with_times_and_ranks(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = list("é [0m".encode())
    (journal / "journal").write_text(
        entries("=== nanofleet-a started", "OldError: x", "=== nanofleet-a started", "[rank 1] step 1/9",
                "[rank 1] final: no rows", bytes_of)
    )  # fmt: skip
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal), since="-1h", lines=3)
    assert [(line["time"], line["rank"], line["text"]) for line in read["lines"]] == [
        (4.0, 1, "step 1/9"), (5.0, 1, "final: no rows"), (6.0, None, "é [0m"),
    ]  # fmt: skip
    assert (read["cursor"], read["source"], read["ended"]) == ("c6", "journal", True)
    assert read["error"][0]["text"] == "final: no rows", "of the last attempt, not of one before"
    assert "--unit=nanofleet-a.service" in (journal / "asked").read_text()
    assert "--since=-1h" in (journal / "asked").read_text()


def test_since_a_time_the_newest_lines_are_read(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before systemd 254, journalctl --since --lines prints the oldest lines."""
    monkeypatch.setattr(run_log, "SEARCHED", 2)
    (journal / "journal").write_text(entries("a", "b", "c", "d"))
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal), since="-1h", lines=2)
    assert [line["text"] for line in read["lines"]] == ["c", "d"]
    assert read["cursor"] == "c4"


TORCHRUN = """E1121 16:19:04 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 7)
Traceback (most recent call last):
  File "run.py", line 198, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
============================================================""".splitlines()
"""What torchrun says when a rank has ended."""


def test_torchruns_echo_is_left_out(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = ["[rank 1] final: the loss is nan", "[rank 1]   field  a  b"]
    (journal / "journal").write_text(
        entries(
            "[rank 1] step 1/9", *end, *TORCHRUN[:4], "[rank 2] retryable: lost", *TORCHRUN[4:], "Not again."
        )
    )
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal))
    texts = [line["text"] for line in read["lines"]]
    assert texts == ["step 1/9", *(line[9:] for line in end), TORCHRUN[0], "retryable: lost", "Not again."]
    assert [line["text"] for line in read["error"]] == [line[9:] for line in end]
    own = ["Traceback (most recent call last):", '  File "x.py"', "ValueError: the cause", "more"]
    (journal / "journal").write_text(entries(*own))
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal))
    assert [line["text"] for line in read["lines"]] == own, "a traceback of the trainer's stays"


def test_a_closed_journal_is_made_up_for_by_the_log(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (journal / "train.log").write_text("[rank 0] step 1/9\nall well\n")
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal))
    assert read["source"] == "file"
    assert [line["text"] for line in read["lines"]] == ["step 1/9", "all well"]
    assert read["error"] == []
    with open(journal / "train.log", "a") as log:  # while follow_log reads
        log.write("[rank 0] step 2/9\n[rank 0] half a li")
    for expected in (["step 2/9"], []):
        read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal), cursor=read["cursor"])
        assert [line["text"] for line in read["lines"]] == expected
    with open(journal / "train.log", "a") as log:
        log.write("ne\n")
    read = call(run_log, monkeypatch, run_id="a", run_dir=str(journal), cursor=read["cursor"])
    assert [line["text"] for line in read["lines"]] == ["half a line"]


def test_a_step_is_reported_by_one_host_unless_all_are_asked_for(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = [
        "[rank 1] step 1/9 loss 5.0000 lr 1.00",
        "[rank 1] step 1: 2.1 bits per byte",
        "[rank 1] step 2/9",
    ]
    (journal / "journal").write_text(entries(*printed, "[rank 1] step 2/9 loss 4.0000 lr 1.00"))
    asked: dict[str, Any] = {"run_id": "a", "run_dir": str(journal)}
    quiet = call(run_log, monkeypatch, **asked, steps=False, lines=2)
    assert [line["text"] for line in quiet["lines"]] == ["step 1: 2.1 bits per byte", "step 2/9"]
    assert quiet["cursor"] == "c4", "what is left out is not read again"
    assert len(call(run_log, monkeypatch, **asked)["lines"]) == 4
    up = state(found=True)
    assert summary({"tower": up, "laptop": up})["speaker"] == "tower"
    assert summary({"tower": {"unreachable": True}, "laptop": up, "attic": up})["speaker"] == "laptop"


def line(text: str, time: float | None, rank: int | None = None) -> dict[str, Any]:
    return {"text": text, "time": time, "rank": rank}


def read(*lines: dict[str, Any], error: int | None = None, source: str = "journal") -> dict[str, Any]:
    return {"lines": list(lines), "source": source, "error": [] if error is None else list(lines[error:])}


def test_lines_are_merged_by_time_and_the_first_error_stands_first() -> None:
    tower = read(line("step 1", 10.0, 0), line("Lost rank 1", 13.0, 0), error=1)
    laptop = read(line("step 1", 11.0, 1), line("ValueError: no rows", 12.0, 1), error=1)
    printed = logs.merged_logs({"tower": tower, "laptop": laptop, "attic": {"unreachable": True}}, "a")
    first, merged = printed.split("Run a: 4 lines")
    assert "ValueError: no rows" in first
    assert "Lost rank 1" not in first
    assert "attic did not answer" in first
    order = [
        merged.index(part) for part in ("tower:0  step", "laptop:1  step", "laptop:1  Value", "tower:0  Lost")
    ]
    assert order == sorted(order)


def test_how_a_run_ended_stands_last() -> None:
    read = {"lines": [{"time": 1.0, "rank": 0, "text": "step 1/9"}], "error": [], "source": "journal"}
    outcome = {"outcome": "final", "reason": "The disk is full."}
    ended = {"found": True, "ended": True, "outcome": outcome}
    states = {"tower": ended, "laptop": {**ended, "outcome": {**outcome, "reason": "tower: full."}}}
    printed = logs.merged_logs({"tower": read}, "a", 10, states).splitlines()
    assert printed[-2:] == [
        "Outcome:     final on tower: The disk is full.", "Outcome:     final on laptop: tower: full.",
    ]  # fmt: skip
    assert "Outcome" not in logs.merged_logs({"tower": read}, "a", 10, {"tower": {**ended, "ended": False}})


def test_lines_without_a_time_keep_their_place() -> None:
    printed = logs.merged_logs(
        {"tower": read(line("a", None), line("b", None), source="file")}, "x", newest=1
    )
    assert printed.splitlines()[-1] == "-------- tower  b"
    assert "without times" in printed


def test_more_lines_are_offered_as_far_as_preflight_admits_them() -> None:
    declared = yaml.safe_load((ROOT / "roles" / "preflight" / "vars" / "declared_settings.yml").read_text())
    at_most = declared["preflight_declared_settings"]["log_lines"]["max"]
    for newest in (100, 5000, at_most):  # logs.yml's own, with since, and all there are
        many = read(*[line(str(n), None) for n in range(newest)])
        offered = re.search(r"log_lines=(\d+)", logs.merged_logs({"tower": many}, "x", newest=newest))
        assert newest <= at_most
        if newest < at_most:
            assert offered
            assert newest < int(offered[1]) <= at_most
        else:
            assert offered is None


@pytest.mark.parametrize(
    ("given", "asked"),
    [("", ""), ("10min", "-10m"), ("10mins", "-10m"), ("90 secs", "-90s"),
     ("2h ago", "-2h"), ("3 hours", "-3h"), ("-1 d", "-1d"), ("today", "today"),
     ("2026-11-21T14:05", "2026-11-21 14:05"), ("14:05", "14:05")],
)  # fmt: skip
def test_since_is_a_span_or_a_moment(given: str, asked: str) -> None:
    assert run_log.since_words(given) == asked


@pytest.mark.parametrize("given", ["soon", "T"])
def test_another_since_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=f"since={given} is not a time"):
        run_log.since_words(given)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.pt").write_text("weights")
    sums = {"model.pt": run_files.sha256_of(str(checkpoint / "model.pt"))}
    (checkpoint / "meta.json").write_text(json.dumps({"sha256": sums}))
    (folder / "metrics.jsonl").write_text("one\n")
    return folder


def test_copies_are_compared_with_what_was_listed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = call(run_files, monkeypatch, path=str(run_dir), checkpoint="checkpoints/step_000002")
    names = [file["name"] for file in listed["files"]]
    assert names == ["metrics.jsonl", "checkpoints/step_000002/model.pt", "checkpoints/step_000002/meta.json"]

    def faults() -> list[str]:
        found: list[str] = call(run_files, monkeypatch, path=str(run_dir), expected=listed["files"])["faults"]
        return found

    (run_dir / "metrics.jsonl").write_text("one\ntwo\n")  # the run continues
    assert faults() == []
    (run_dir / "metrics.jsonl").write_text("on")
    (run_dir / "checkpoints" / "step_000002" / "model.pt").write_text("weighty")
    assert faults() == [
        "metrics.jsonl does not match its sha256",
        "checkpoints/step_000002/model.pt does not match its sha256",
    ]
    (run_dir / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in faults()


def test_a_checkpoint_damaged_on_the_host_is_found_out(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "checkpoints" / "step_000002" / "model.pt").write_text("w?ights")
    listed = call(run_files, monkeypatch, path=str(run_dir), checkpoint="checkpoints/step_000002")
    compared = call(run_files, monkeypatch, path=str(run_dir), expected=listed["files"])
    assert compared["faults"] == ["checkpoints/step_000002/model.pt does not match its sha256"]


def test_a_checkpoint_that_was_dropped_meanwhile_is_reported(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = call(run_files, monkeypatch, path=str(run_dir), checkpoint="checkpoints/step_000009")
    assert gone["failed"]
    assert "Fetch again" in gone["msg"]
