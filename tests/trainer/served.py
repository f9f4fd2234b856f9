"""A checkpoint of a tiny model, and servers of it in this process, for the tests of chat and serve."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import uvicorn
from golden_chat import byte_tokenizer

from trainer.chat.loaded import load
from trainer.checkpoint.storage import State, save
from trainer.config import RunConfig
from trainer.model.gpt import GPT, GPTConfig
from trainer.serve.app import make_app
from trainer.serve.scheduler import Scheduler
from trainer.serve.server import listen

CONFIG = GPTConfig(512, 265, 2, 2, 2, 32, "SL")


def write_checkpoint(run_dir: Path, step: int = 7, stage: str = "base") -> Path:
    """Write a checkpoint of a model with random weights, of the run `tiny`; returns its path."""
    model = GPT(CONFIG)
    generator = torch.Generator().manual_seed(step)
    model.init_weights(generator)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    tokenizer = run_dir / "tokenizer"
    byte_tokenizer().save(tokenizer)
    meta = {"step": step, "run_id": "tiny", "config": RunConfig(stage=stage).to_dict()}
    meta["model_config"] = dataclasses.asdict(CONFIG)
    return save(run_dir / "checkpoints", State(meta, model.state_dict(), {}), tokenizer)


@contextlib.contextmanager
def serving(
    checkpoint: Path, batch: int = 16, queue: int = 64, api_key: str = "", delay: float = 0.0
) -> Iterator[tuple[str, Scheduler]]:
    """Serve a checkpoint; yields the URL and the scheduler. delay: seconds that each step takes longer."""
    scheduler = Scheduler(load(checkpoint, "float32"), batch, queue)
    if delay:
        engine = scheduler.loaded.engine
        step = engine.step
        engine.step = lambda sequences: (time.sleep(delay), step(sequences))[1]  # type: ignore[method-assign]
    scheduler.start()
    with listen("127.0.0.1", 0) as sock:
        server = uvicorn.Server(uvicorn.Config(make_app(scheduler, api_key), log_level="warning"))
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", scheduler
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
            scheduler.stop()
