"""Generates text with a trained model, and prints it piece by piece.

python -m trainer sample --checkpoint runs/d4-1a2b3c4d/checkpoints/step_000100 --prompt "The "
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from trainer.chat.answer import REPLACEMENT, Answer
from trainer.chat.engine import COLDEST, Engine, Sampling, Tools
from trainer.chat.engine import run as run_engine
from trainer.checkpoint.storage import load_model
from trainer.config import ConfigError
from trainer.data.conversations import render_for_completion
from trainer.data.files import write_whole
from trainer.data.tokenizer import Tokenizer
from trainer.host.gemm_library import choose_library
from trainer.host.logger import set_up_streams
from trainer.model.gpt import GPT
from trainer.stages import BASE, SFT

KEPT = "sample.txt"  # in the run directory: the newest sample
PROMPT, QUESTION = "The ", "What can you tell me?"
SAMPLING = Sampling(temperature=0.8, top_k=0, max_tokens=64, seed=42)


def generate(model: GPT, tokens: list[int], sampling: Sampling) -> Iterator[int]:
    """Yield the token ids with which the model continues `tokens`.

    tokens: token ids. sampling: how the new tokens are drawn. When the context is full, its older half is
    dropped, so that long texts stay cheap.
    """
    engine = Engine(model)
    yield from run_engine(engine, engine.start(tokens, sampling, slides=True))


def stream_text(model: GPT, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yield the text that continues `prompt`, in pieces of whole characters, until the document ends.

    sampling: how tokens are drawn. The text ends before the token BOS, or after sampling.max_tokens tokens.
    """
    ids: list[int] = []
    shown = ""
    for token in generate(model, [tokenizer.bos_id, *tokenizer.encode(prompt)], sampling):
        if token == tokenizer.bos_id:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole


def sample(model: GPT, tokenizer: Tokenizer, stage: str = BASE) -> str:
    """Generate a short text that shows what the model does. stage: stage of its run, base or sft.

    In stage base the result is PROMPT and its continuation. In stage sft it is QUESTION and the answer.
    """
    if stage != SFT:
        return PROMPT + "".join(stream_text(model, tokenizer, PROMPT, SAMPLING))
    answer = Answer(tokenizer)
    engine = Engine(model, Tools.of(tokenizer))
    prompt = render_for_completion([{"role": "user", "content": QUESTION}], tokenizer)
    answer.add(list(run_engine(engine, engine.start(prompt, SAMPLING, slides=True))))
    answer.end()
    return f"user: {QUESTION}\nassistant: {answer.text}"


def write(model: GPT, tokenizer: Tokenizer, run_dir: Path, stage: str = BASE) -> str:
    """Generate a sample of text and write it to sample.txt in the run directory; returns the text.

    model, tokenizer: generate the text. stage: stage of the run, base or sft. Raises OSError if the file
    cannot be written.
    """
    text = sample(model, tokenizer, stage)
    write_whole(run_dir / KEPT, (text + "\n").encode())
    return text


def last(run_dir: Path) -> str | None:
    """The text in sample.txt of the run directory; None if the file is missing or cannot be read."""
    try:
        return (run_dir / KEPT).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError):
        return None


def run(args: argparse.Namespace) -> int:
    """`sample`: print text that continues --prompt; returns the exit code 0. args: the parsed options.

    Raises ConfigError or DataError if an option is not valid or the checkpoint cannot be loaded.
    """
    if 0 < args.temperature < COLDEST:
        raise ConfigError(f"--temperature is {args.temperature:g}: it takes 0, or {COLDEST:g} or more.")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}: it must be at least 1.")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed is {args.seed}: it takes a whole number from 0, below 2^63.")
    set_up_streams()
    choose_library()
    model, tokenizer = load_model(args.checkpoint)
    print(args.prompt, end="", flush=True)
    sampling = Sampling(args.temperature, 0, args.max_tokens, args.seed)
    for piece in stream_text(model, tokenizer, args.prompt, sampling):
        print(piece, end="", flush=True)
    print()
    return 0
