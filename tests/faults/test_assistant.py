"""Faults of fine-tuning, evaluating and serving: what is reported, and that the model answers in the end."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .messages import message
from .site import COORDINATOR, IMPATIENT, ROOT, STATE, TINY, WORKER, Site

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

BUNDLE = ROOT / "tests" / "fixtures" / "core"
SERVER = "nanofleet-serve.service"


@pytest.fixture(scope="module")
def base(site: Site) -> str:
    """A run with a checkpoint, which has ended."""
    name = f"base-{int(time.time())}"
    site.train(name, steps=10)
    site.play("playbooks/watch.yml", name)
    return name


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    ask, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Nothing at all."}
    path.write_text(f"{json.dumps([ask, answer])}\n" * 400)
    return path


@pytest.fixture(scope="module")
def tuned(site: Site, base: str, chats: Path) -> Iterator[dict[str, Any]]:
    """The settings of a run that fine-tunes, which is past its first checkpoint."""
    steps = {
        name: TINY[name] for name in ("steps", "save_every", "eval_every", "sample_every", "eval_tokens")
    }
    asked = {
        "stage": "sft",
        "from_run": base,
        "conversations": chats,
        "doctor": "never",
        "elastic": False,
        **steps,
    }
    asked |= {"launch_stall_seconds": IMPATIENT, "run_id": f"tuned-{int(time.time())}"}
    begin(site, asked)
    yield asked
    site.stop(asked["run_id"])
    site.nothing_is_left()


def begin(site: Site, asked: dict[str, Any], **more: Any) -> str:
    """Start or resume the run that fine-tunes, and wait until it is past a checkpoint."""
    given = {name: value for name, value in asked.items() if name != "run_id"}
    printed = site.play("train.yml", asked["run_id"], **given, **more)
    site.trains(asked["run_id"], beyond=12)
    return printed


def asked_of(url: str, text: str = "What?") -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer of the model to a question."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def served_step(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        return int(json.load(reply)["step"])


def test_a_rank_that_fine_tunes_is_killed(site: Site, tuned: dict[str, Any]) -> None:
    run = tuned["run_id"]
    site.survives(
        run,
        "SIGKILL of a rank that fine-tunes",
        lambda: site.inside(WORKER, f"kill -KILL {site.pid(WORKER, run)}"),
        "Lost rank 1",
        within=20,
    )
    losses = site.losses(run)
    assert losses[max(losses)] < losses[min(losses)]


def test_a_damaged_file_of_conversations_is_sent_again(site: Site, tuned: dict[str, Any]) -> None:
    """The size and the time of the file are as before."""
    run = tuned["run_id"]
    site.stop(run)
    folder = site.inside(WORKER, f"ls -td {STATE}/chats-*").splitlines()[0]
    shard = f"{folder}/shards/shard_00000.parquet"
    keeps = f"touch -r {shard} /tmp/time; {{}}; touch -r /tmp/time {shard}"
    spoils = f"printf x | dd of={shard} bs=1 seek=20 conv=notrunc status=none"
    site.inside(WORKER, keeps.format(spoils))
    started = time.monotonic()
    printed = begin(site, tuned)
    text = " ".join(printed.split()).replace("''", "'")  # as YAML quotes it
    assert (
        f"{site.names[1]}: shard_00000.parquet was altered (its sha256 is not the manifest's). Sent again."
        in text
    )
    assert "Resuming from the checkpoint" in site.inside(COORDINATOR, f"cat {STATE}/runs/{run}/train.log")
    seconds = time.monotonic() - started
    site.note(
        "a file of conversations altered on a host", seconds, message(printed, "was altered"), "sent, resumed"
    )


def test_a_model_is_served_while_a_host_leaves(site: Site, tuned: dict[str, Any]) -> None:
    run, url = tuned["run_id"], f"http://{site.addresses[COORDINATOR - 1]}:8000"
    site.play("serve.yml", run, follow=True)
    try:
        status, answer = asked_of(url)
        assert (status, answer["model"]) == (200, run)
        log, before = site.log_size(COORDINATOR, run), served_step(url)
        site.outside("podman kill {name}", WORKER)
        try:
            started = time.monotonic()
            status, answer = asked_of(url)
            seconds = time.monotonic() - started
            assert status == 200, answer
        finally:
            site.outside("podman start {name}", WORKER)
            site.boots(WORKER)
        site.resumed(run, log)
        site.until(lambda: served_step(url) > before, 120, "a newer checkpoint is served")
        printed = f"answered with step {before}, later with step {served_step(url)}"
        site.note("a host leaves while its run is served", seconds, printed, "answered, resumed")

        status, answer = asked_of(url, "What? " * 200)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        sentence = answer["error"]["message"]
        assert "Shorten the conversation" in sentence
        site.note("a conversation longer than the context", 0.0, sentence, "refused; the server continues")

        started = time.monotonic()
        site.inside(COORDINATOR, f"systemctl kill --signal=KILL {SERVER}")
        site.until(
            lambda: site.inside(COORDINATOR, f"systemctl show -P NRestarts {SERVER}") == "1", 60, "a restart"
        )
        site.until(lambda: answers(url), 90, "an answer")
        then = "restarted by systemd; it answers"
        seconds = time.monotonic() - started
        site.note(
            "SIGKILL of the model server, as when memory runs out", seconds, f"{SERVER} failed (signal)", then
        )
    finally:
        site.play("serve.yml", run, serve_state="stopped")
    assert site.inside(COORDINATOR, f"systemctl is-active {SERVER} || true") == "inactive"


def answers(url: str) -> bool:
    try:
        return asked_of(url)[0] == 200
    except OSError:
        return False


def test_a_run_that_trains_is_not_evaluated(site: Site, tuned: dict[str, Any]) -> None:
    run = tuned["run_id"]
    started = time.monotonic()
    printed = site.play("eval.yml", run, fails=True)
    seconds = time.monotonic() - started
    words = f"NF451: {site.names[0]} is busy with the run {run}"
    assert words in " ".join(printed.split())
    assert f"stop.yml -e run_id={run}" in " ".join(printed.split())
    site.note(
        "eval.yml while a run trains", seconds, message(printed, "is busy with"), "refused; the run continues"
    )


def test_a_bundle_that_a_host_lacks_is_named(site: Site, base: str) -> None:
    site.clear()
    site.play("eval.yml", base, core=BUNDLE)  # a bundle of its own, which runs do not use
    own = f"{STATE}/data/core"
    site.inside(COORDINATOR, f"cp -a {STATE}/core/core {own}")
    try:
        started = time.monotonic()
        printed = site.play("eval.yml", base, fails=True)
        seconds = time.monotonic() - started
    finally:
        site.inside(COORDINATOR, f"rm -r {own}")
    words = f"is not the same on all hosts; it is missing on {site.names[1]}."
    assert words in " ".join(printed.split())
    site.note("a CORE bundle missing on a host", seconds, message(printed, "The CORE bundle in"), "refused")
    site.nothing_is_left()


def test_a_killed_rank_ends_the_evaluation_which_continues(site: Site, base: str, tmp_path: Path) -> None:
    """The tasks that were finished are not evaluated again."""
    run = f"eval:{base}"
    play = site.begin("eval.yml", base, tmp_path, core=BUNDLE)
    pattern = f"-u -m trainer eval .*{run}"
    find = f"pgrep -u nanofleet -f -- '^[^ ]*python {pattern}' || true"
    site.until(lambda: site.inside(WORKER, find), 120, "a rank that evaluates", play)
    started = time.monotonic()
    site.inside(WORKER, f"kill -KILL {site.inside(WORKER, find).split()[0]}")
    assert play.end() != 0, play.output
    seconds = time.monotonic() - started
    printed = " ".join(play.output.split())
    assert "NF454: The evaluation has not finished." in printed
    assert "then repeat the command" in printed
    site.nothing_is_left()
    again = site.play("eval.yml", base, core=BUNDLE)
    assert "The results of" in again
    site.note(
        "SIGKILL of a rank that evaluates",
        seconds,
        message(play.output, "NF454"),
        "ended; continued by the same command",
    )
