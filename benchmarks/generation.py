"""Measures generation in tokens per second: with the KV cache in each number format, and without a cache.

    python -m benchmarks.generation                       depth 8, 512 tokens of context, two threads
    python -m benchmarks.generation --depth 2 --tokens 8  quick

The weights are random; they take the same time as trained weights. Prints a table, with several numbers of
sequences for each format. The exit code is 1 if the best format, with one sequence, is less than TARGET times
as fast as recomputing the context for each token.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch

from trainer.chat.engine import Engine, Sampling
from trainer.chat.precision import set_format
from trainer.model.gpt import GPT, GPTConfig

TARGET = 10.0
BATCHES = (1, 4, 16)


@torch.inference_mode()
def recomputed(model: GPT, context: int, tokens: int) -> float:
    """Tokens per second without a cache: for each token a context of `context` tokens is recomputed.

    tokens: the number of tokens that are timed.
    """
    ids = torch.randint(model.config.vocab_size, (1, context))
    model(ids, last_only=True)
    start = time.perf_counter()
    for _ in range(tokens):
        model(ids, last_only=True)
    return tokens / (time.perf_counter() - start)


def cached(model: GPT, context: int, tokens: int, batch: int) -> float:
    """Tokens per second of `batch` sequences together, with a KV cache.

    Each sequence begins with a prompt of `context` tokens. `tokens` tokens are generated and timed for each.
    """
    engine = Engine(model)
    prompt = torch.randint(model.config.vocab_size, (context,)).tolist()
    sequences = [engine.start(prompt, Sampling(0, 0, tokens + 1)) for _ in range(batch)]
    while not all(sequence.generated for sequence in sequences):
        engine.step(sequences)
    start, before = time.perf_counter(), sum(sequence.generated for sequence in sequences)
    while not all(sequence.done for sequence in sequences):
        engine.step(sequences)
    return (sum(s.generated for s in sequences) - before) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = GPT(GPTConfig.from_depth(args.depth, args.vocab_size))
    model.init_weights(torch.Generator().manual_seed(1))
    plain = recomputed(model.eval(), args.context, max(args.tokens // 8, 2))
    print(f"depth {args.depth}, context {args.context}, {args.threads} threads, torch {torch.__version__}")
    print(f"{'format':10} {'batch':>5} {'tokens/s':>9} {'factor':>7}")
    print(f"{'recomputed':10} {1:5} {plain:9.1f} {1:7.1f}")
    best = 0.0
    for name in ("float32", "bfloat16", "int8"):
        converted = copy.deepcopy(model)
        set_format(converted, name)
        for batch in BATCHES:
            speed = cached(converted, args.context, args.tokens, batch)
            best = max(best, speed) if batch == 1 else best
            print(f"{name:10} {batch:5} {speed:9.1f} {speed / plain:7.1f}", flush=True)
    print(f"best format alone: {best / plain:.1f} times as fast (target {TARGET:g})")
    return 0 if best >= TARGET * plain else 1


if __name__ == "__main__":
    raise SystemExit(main())
