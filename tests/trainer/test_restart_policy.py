"""Whether another attempt makes sense: from what is left in the run's directory, by exit code."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.health import attempt_history
from trainer.health import restart_policy as policy
from trainer.health.attempt import Attempt
from trainer.host.rank_env import RankEnv


def attempt(run_dir: Path, outcome: str, step: int, reason: str = "Lost rank 1 (laptop).") -> None:
    """One attempt, from its beginning to its end."""
    one = Attempt(run_dir, RankEnv())
    one.begin()
    one.update(step=step)
    (run_dir / "heartbeat-0.json").write_text("{}")
    one.end(outcome, reason)


def test_the_first_attempt_needs_no_directory(tmp_path: Path) -> None:
    assert policy.judge(tmp_path / "none") == (
        True,
        "This is the first attempt.",
        0,
        0.0,
    )


@pytest.mark.parametrize("outcome", ["final", "stopped", "finished"])
def test_what_is_settled_is_not_tried_again(
    tmp_path: Path, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path, outcome, 5, "The loss of step 6 is nan.")
    assert main(["again", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"No restart. {outcome}: The loss of step 6 is nan.\n"


def test_what_another_rank_of_the_host_knows_counts(tmp_path: Path) -> None:
    """Of two ranks of one host, the one that torchrun ended knows less than the one that failed."""
    ranks = [Attempt(tmp_path, RankEnv(rank, 2, rank, 2)) for rank in (0, 1)]
    for rank in ranks:
        rank.begin()
    ranks[1].end("final", "Unexpected KeyError.")
    ranks[0].end("retryable", "torchrun ended this rank.")
    assert policy.judge(tmp_path)[:2] == (False, "final: Unexpected KeyError.")
    (tmp_path / "outcome-5.json").write_text('{"outcome": "final"}')  # of a rank this host no longer has
    for rank in ranks:
        rank.begin()
    assert not list(tmp_path.glob("outcome*"))


def test_waits_grow_without_progress_and_end_with_it(tmp_path: Path) -> None:
    waits = []
    for step in (10, 8, 10, 9, 11, 11):
        attempt(tmp_path, "retryable", step)
        waits.append(policy.judge(tmp_path).wait_seconds)
    assert waits == [0, 5, 10, 20, 0, 5]
    assert policy.wait_after(1000) == 60
    lines = attempt_history.history(tmp_path)
    assert [line["step"] for line in lines] == [10, 8, 10, 9, 11, 11]
    assert [line["requested"] for line in lines] == [True, False, False, False, False, False]
    assert lines[0]["outcome"] == "retryable"
    assert lines[0]["seconds"] >= 0


def test_a_limit_ends_it_and_a_person_begins_anew(tmp_path: Path) -> None:
    for _ in range(4):
        attempt(tmp_path, "retryable", 3)
    assert main(["again", "--run-dir", str(tmp_path), "--limit", "4"]) == 0
    attempt(tmp_path, "retryable", 0)  # it did not load the checkpoint
    verdict = policy.judge(tmp_path, limit=4)
    assert verdict.reason.startswith("5 attempts in a row did not get past step 3. When the cause")
    assert verdict.reason.endswith(" starts the run again. The last attempt: Lost rank 1 (laptop).")
    assert main(["again", "--run-dir", str(tmp_path), "--limit", "4"]) == 1

    (tmp_path / "outcome.json").unlink()
    (tmp_path / "heartbeat-0.json").unlink()
    assert policy.judge(tmp_path, limit=4).again
    attempt(tmp_path, "retryable", 3)
    assert policy.judge(tmp_path, limit=4)[2:] == (1, 0.0)


def test_an_attempt_that_was_killed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Attempt(tmp_path, RankEnv())
    killed.begin()
    pid = json.loads((tmp_path / "attempt.json").read_text())["pid"]
    beat = {"pid": pid, "rank": 0, "run_id": "r", "step": 812, "phase": "backward", "time": time.time() + 9}
    (tmp_path / "heartbeat-0.json").write_text(json.dumps(beat))
    assert killed._held is not None
    killed._held.close()  # as its end would
    verdict = policy.judge(tmp_path)
    assert verdict.again
    assert verdict.reason.endswith(
        "Killed by SIGKILL in backward after step 812: by hand, or by the kernel because memory ran out (to "
        "check, on that host: sudo dmesg | grep -i oom)."
    )
    with monkeypatch.context() as patch:
        patch.setattr(attempt_history, "_boot_id", lambda: "another")
        assert policy.judge(tmp_path).reason.endswith("Its host went down in backward after step 812.")
    attempt(tmp_path, "retryable", 812)
    lines = attempt_history.history(tmp_path)
    assert [(line["step"], line["rank"]) for line in lines] == [(812, 0), (812, 0)]
    assert lines[0]["seconds"] == pytest.approx(9, abs=1)
    assert policy.judge(tmp_path).wait_seconds == 5


def test_damaged_files_do_not_stand_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(tmp_path, "retryable", 3)
    with open(tmp_path / "policy.jsonl", "a") as file:
        file.write('{"step": 3, "outco\n[1]\n')
    (tmp_path / "attempt.json").write_text("")
    assert main(["again", "--run-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fruitless"] == 1


def test_a_first_attempt_that_made_no_step_may_be_the_last(tmp_path: Path) -> None:
    """train.yml waits for the first step and reports why there is none: nothing may continue meanwhile."""
    attempt(tmp_path, "retryable", 0, "The store did not answer.")
    assert policy.judge(tmp_path).again
    refused = policy.judge(tmp_path, first_must_step=True)
    assert refused[:2] == (False, "The first attempt made no step: The store did not answer.")
    (tmp_path / "heartbeat-0.json").write_text('{"loss": 5.0}')
    assert policy.judge(tmp_path, first_must_step=True).again
    attempt(tmp_path, "retryable", 0)  # of the attempts that follow, none is the first
    assert policy.judge(tmp_path, first_must_step=True).again


def test_an_outcome_shows_whether_nobody_wants_another_attempt(tmp_path: Path) -> None:
    """Who asks for a stop means it; a host that shuts down ends its ranks by SIGTERM, unasked."""
    for outcome, settled in (("finished", None), ("stopped", None), ("stopped", False), ("retryable", None)):
        one = Attempt(tmp_path, RankEnv())
        one.begin()
        one.end(outcome, "as it was", settled=settled)
    assert [line["settled"] for line in attempt_history.history(tmp_path)] == [True, True, False, False]


def test_giving_up_is_written_down(tmp_path: Path) -> None:
    for _ in range(3):
        attempt(tmp_path, "retryable", 3)
    assert main(["again", "--run-dir", str(tmp_path), "--limit", "2"]) == 1
    assert not json.loads((tmp_path / "outcome.json").read_text())["settled"], "it was only asked"
    assert main(["again", "--run-dir", str(tmp_path), "--limit", "2", "--wait"]) == 1
    given_up = json.loads((tmp_path / "outcome.json").read_text())
    assert (given_up["outcome"], given_up["settled"]) == ("retryable", True)


def test_one_that_was_killed_once_too_often_gets_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "heartbeat-0.json").write_text('{"pid": 1, "step": 3, "phase": "sync"}')
    (tmp_path / "attempt.json").write_text('{"pid": 1, "requested": true}')
    assert main(["again", "--run-dir", str(tmp_path), "--first-must-step", "--wait"]) == 1
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["settled"]
    assert outcome["reason"].startswith("Killed by SIGKILL")


def test_one_that_cannot_even_load_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, or without a library, before the trainer could write a line: it must not be tried for ever."""
    slept: list[float] = []
    monkeypatch.setattr(policy.time, "sleep", slept.append)
    attempt(tmp_path, "retryable", 5)
    starts = [main(["again", "--run-dir", str(tmp_path), "--limit", "3", "--wait"]) for _ in range(5)]
    assert (starts, slept) == ([0, 0, 0, 1, 1], [0, 5, 10])
    assert "ended while it loaded" in policy.judge(tmp_path, 3).reason
    assert [line["step"] for line in attempt_history.history(tmp_path)] == [5, 5, 5]
    assert json.loads((tmp_path / "outcome.json").read_text())["settled"]


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (
            "torch.distributed.DistStoreError: Timed out after 46 seconds waiting for clients.",
            "The ranks did not connect to the rendezvous store: Timed out after 46 seconds waiting for "
            "clients.",
        ),
        (
            "ModuleNotFoundError: No module named 'numpy'",
            "The attempt ended while it loaded: ModuleNotFoundError: No module named 'numpy'",
        ),
        (
            "",
            "The attempt ended while it loaded. To see the reason: ansible-playbook logs.yml. If the log has "
            "none, the kernel may have killed it because memory ran out (to check, on that host: sudo dmesg "
            "| grep -i oom).",
        ),
    ],
)
def test_one_that_never_began_ends_with_the_word_of_its_log(tmp_path: Path, raised: str, reason: str) -> None:
    before = "=== nanofleet-a started\nValueError: of the attempt before\n"
    trace = "Traceback (most recent call last):\n  File x\n"
    (tmp_path / "train.log").write_text(f"{before}=== nanofleet-a started\n{trace}{raised}\nframe #0: c10\n")
    assert main(["again", "--run-dir", str(tmp_path), "--wait"]) == 0
    os.utime(tmp_path / "train.log", (1000.0, 1000.0))
    assert policy.judge(tmp_path, 3).reason == f"The last attempt: {reason}"
    assert main(["again", "--run-dir", str(tmp_path), "--wait"]) == 0
    assert attempt_history.history(tmp_path)[-1]["time"] == 1000.0, "it ended with its last words"


def test_a_first_attempt_that_cannot_even_load_may_be_the_last(tmp_path: Path) -> None:
    asked = ["again", "--run-dir", str(tmp_path), "--first-must-step", "--wait"]
    assert main(asked) == 0
    assert main(asked) == 1
    assert json.loads((tmp_path / "outcome.json").read_text())["outcome"] == "retryable"


def test_an_announced_attempt_that_begins_is_one(tmp_path: Path) -> None:
    assert main(["again", "--run-dir", str(tmp_path), "--wait"]) == 0
    attempt(tmp_path, "retryable", 5)
    assert not (tmp_path / "announced.json").exists()
    assert [(line["step"], line["requested"]) for line in attempt_history.history(tmp_path)] == [(5, True)]
    killed = Attempt(tmp_path, RankEnv())
    killed.begin()
    (tmp_path / "heartbeat-0.json").write_text(json.dumps({"pid": os.getpid(), "step": 7, "phase": "sync"}))
    assert main(["again", "--run-dir", str(tmp_path), "--wait"]) == 0
    assert [line["step"] for line in attempt_history.history(tmp_path)] == [5, 7]


def test_a_host_that_went_down_resumes_its_run_unless_it_is_over(tmp_path: Path) -> None:
    """An orderly shutdown leaves `stopped`, unsettled; a power cut leaves no outcome."""
    asks = ["again", "--run-dir", str(tmp_path), "--at", "boot"]
    one = Attempt(tmp_path, RankEnv())
    one.begin()
    one.update(step=5)
    (tmp_path / "heartbeat-0.json").write_text('{"loss": 5.0}')
    assert main(asks) == 0, "a power cut"
    ended = ["again", "--run-dir", str(tmp_path), "--at", "end"]
    assert main(ended) == 0, "a failure that may be retried"
    one.end("stopped", "Asked to end by SIGTERM.", settled=False)
    assert main(ended) == 0
    assert list(tmp_path.glob("outcome*")), "it only reads"
    assert main(["again", "--run-dir", str(tmp_path)]) == 1, "systemctl stop, say"
    assert main(asks) == 0
    assert not list(tmp_path.glob("outcome*")), "else the unit's own condition would end it"
    assert main(["again", "--run-dir", str(tmp_path)]) == 0
    two = Attempt(tmp_path, RankEnv())
    two.begin()
    two.end("stopped", "Asked to end by SIGTERM.", settled=False)
    assert main([*asks[:-1], "killed"]) == 0, "the main process was killed, and systemd has ended the ranks"
    assert not list(tmp_path.glob("outcome*"))
    (tmp_path / "stop").touch()
    assert main([*asks[:-1], "killed"]) == 1, "the main process was killed while the run stopped"
    assert main(asks) == 1, "stop.yml asked, then the power was cut"
    (tmp_path / "stop").unlink()
    for outcome in policy.SETTLED:
        (tmp_path / "outcome.json").write_text(json.dumps({"outcome": outcome, "settled": True}))
        assert main(ended) == 1
        assert main(asks) == 1
        assert (tmp_path / "outcome.json").exists()
