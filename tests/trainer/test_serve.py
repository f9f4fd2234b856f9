"""The server, asked by the official client of OpenAI."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import serving, write_checkpoint

from trainer.__main__ import main
from trainer.chat.loaded import load
from trainer.serve.server import CheckpointFollower

openai = pytest.importorskip("openai")

ASK = [{"role": "user", "content": "a large rank?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served"))


def client(url: str, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(url: str, key: str = "none", **options: Any) -> Any:
    options = {"messages": ASK, "temperature": 0, "max_tokens": 20, **options}
    return client(url, key).chat.completions.create(model="tiny", **options)


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health") as reply:
        return dict(json.load(reply))


def test_a_streamed_answer_is_the_whole_one(checkpoint: Path) -> None:
    with serving(checkpoint) as (url, _):
        assert [model.id for model in client(url).models.list()] == ["tiny"]
        whole = ask(url)
        pieces = [chunk.choices[0] for chunk in ask(url, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert pieces[-1].finish_reason == whole.choices[0].finish_reason
        assert whole.system_fingerprint == "tiny@7"
        assert whole.usage.completion_tokens <= 20
        text = client(url).completions.create(model="tiny", prompt="ab", max_tokens=5, temperature=0)
        assert text.usage.prompt_tokens == 3
        found = health(url)
        assert (found["run_id"], found["step"], found["active"]) == ("tiny", 7, 0)


def test_sixteen_clients_get_what_one_gets(checkpoint: Path) -> None:
    with serving(checkpoint) as (url, _):
        alone = [ask(url, messages=[{"role": "user", "content": "x" * n}]) for n in range(1, 17)]
        with ThreadPoolExecutor(16) as pool:
            jobs = [
                pool.submit(ask, url, messages=[{"role": "user", "content": "x" * n}]) for n in range(1, 17)
            ]
            together = [job.result() for job in jobs]
    assert [a.choices[0].message.content for a in alone] == [a.choices[0].message.content for a in together]


def test_requests_that_cannot_be_answered_get_a_sentence(checkpoint: Path) -> None:
    with serving(checkpoint, api_key="secret") as (url, _):
        with pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
            ask(url)
        with pytest.raises(openai.BadRequestError, match="the context of this model is 512 tokens"):
            ask(url, "secret", messages=[{"role": "user", "content": "x" * 600}])
        with pytest.raises(openai.BadRequestError, match="The messages are no conversation"):
            ask(url, "secret", messages=[*ASK, *ASK])
        with pytest.raises(openai.BadRequestError, match="The request is not valid"):
            ask(url, "secret", temperature=-1)
        with pytest.raises(openai.BadRequestError, match="The messages are no conversation"):
            ask(url, "secret", messages=[{"role": "system", "content": "be brief"}])
        assert ask(url, "secret").choices


@pytest.mark.parametrize("where", ["step", "start"])
def test_memory_that_runs_out_ends_the_answer_and_not_the_server(
    checkpoint: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an answer, or before it."""
    printed = "The host has too little memory for this answer. Shorten the conversation"
    with serving(checkpoint) as (url, scheduler):
        engine, sound, calls = scheduler.loaded.engine, getattr(scheduler.loaded.engine, where), [0]

        def fails(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if where == "start" or calls[0] == 4:
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
                )
            return sound(*args, **options)

        monkeypatch.setattr(engine, where, fails)
        with pytest.raises(openai.InternalServerError, match=printed) as refused:
            ask(url)
        assert refused.value.status_code == 503
        if where == "step":
            calls[0] = 0
            with pytest.raises(openai.APIError, match=printed):
                list(ask(url, stream=True))
        monkeypatch.setattr(engine, where, sound)
        assert ask(url).choices
        assert health(url)["status"] == "ok"


def test_a_full_queue_and_a_client_that_leaves(checkpoint: Path) -> None:
    with serving(checkpoint, batch=1, queue=0, delay=0.05) as (url, scheduler):
        stream = ask(url, stream=True, max_tokens=400, temperature=1, seed=3)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="Try again") as refused:
            ask(url)
        assert refused.value.response.headers["retry-after"] == "5"
        stream.close()
        deadline = time.monotonic() + 10
        while scheduler.active and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not scheduler.active
        assert ask(url, max_tokens=2).choices


def test_a_new_checkpoint_answers_and_drops_no_request(tmp_path: Path) -> None:
    with serving(write_checkpoint(tmp_path, 1), delay=0.02) as (url, scheduler):
        follower = CheckpointFollower(scheduler, tmp_path, "float32")
        stream = iter(ask(url, stream=True, max_tokens=30))
        next(stream)
        write_checkpoint(tmp_path, 2)
        follower.look()
        assert health(url)["step"] == 2
        assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
        assert ask(url).system_fingerprint == "tiny@2"
        damaged = write_checkpoint(tmp_path, 3)
        (damaged / "model.safetensors").write_bytes(b"")
        follower.look()
        assert health(url)["step"] == 2


def test_a_start_that_fails_has_a_sentence(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert main(["serve", "--checkpoint", str(checkpoint), "--port", str(port)]) == 2
    assert f"Port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert main(["serve", "--checkpoint", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "There is no checkpoint directory" in capsys.readouterr().err
    assert main(["serve", "--run-dir", str(tmp_path), "--port", "0"]) == 2
    assert "There is no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "auto"])
def test_formats_stay_near_float32(checkpoint: Path, dtype: str) -> None:
    import torch

    idx = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    exact, other = load(checkpoint, "float32").engine.model, load(checkpoint, dtype).engine.model
    with torch.inference_mode():
        a, b = exact(idx), other(idx)
    assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99


@pytest.mark.processes
def test_sigterm_ends_the_server_without_an_error(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "trainer", "serve", "--checkpoint", str(checkpoint), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert "tiny, step 7 answers on http://127.0.0.1:" in line
        assert ask(line.split()[-1].rstrip("/"), max_tokens=3).choices
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, server.stderr.read()
    finally:
        server.kill()
