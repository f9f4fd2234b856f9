"""Generation with a KV cache: sequences of different length decode together, one token each in a step.

    engine = Engine(model, Tools.of(tokenizer))
    sequence = engine.start(prompt_ids, Sampling(temperature=0))
    while not sequence.done:
        for token in engine.step([sequence])[0]: ...

Prompts are computed in pieces, so that a long prompt does not delay the other sequences. After
<|python_end|>, which ends a call of the calculator, the tokens of the result are appended and not drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.chat.calculator import calculate
from trainer.data.tokenizer import BOS, Tokenizer
from trainer.model.gpt import GPT
from trainer.model.kv_cache import Cache, KVCache, KVCacheRows

PIECE = 256  # tokens of a prompt that are computed in a step
GROWTH = 256  # a cache grows by so many tokens
COLDEST = 1e-3  # the lowest temperature above 0: lower ones exceed the range of float32


class ContextOverflowError(ValueError):
    """Raised for a prompt that leaves no room for an answer. The message is a sentence for the user."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are drawn, and how many.

    temperature: 0 takes the most likely token; the higher, the more varied.
    top_k: draw from the `top_k` most likely tokens; 0: from the whole vocabulary.
    max_tokens: the maximum number of tokens of the answer.
    seed: the seed of the draws; None: a random seed for each answer.
    """

    temperature: float = 0.6
    top_k: int = 50
    max_tokens: int = 256
    seed: int | None = None


@dataclass(frozen=True)
class Tools:
    """The special tokens that the engine needs, and the calculator that the model can call.

    tokenizer: the tokenizer of the model.
    stop: ids of the tokens that end an answer.
    python: ids of the tokens before and after a call of the calculator; None: the tokenizer lacks them.
    output: ids of the tokens before and after the calculator's result; None: the tokenizer lacks them.
    """

    tokenizer: Tokenizer
    stop: frozenset[int]
    python: tuple[int, int] | None
    output: tuple[int, int] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Tools:
        """The tools for `tokenizer`, without a calculator if `tokenizer` lacks the tokens of Python calls."""
        ids = tokenizer.specials
        stop = frozenset(ids[name] for name in (BOS, "<|assistant_end|>") if name in ids)

        def pair(name: str) -> tuple[int, int] | None:
            both = f"<|{name}_start|>", f"<|{name}_end|>"
            return (ids[both[0]], ids[both[1]]) if all(each in ids for each in both) else None

        return cls(tokenizer, stop, pair("python"), pair("output"))

    def output_of(self, expression: Sequence[int]) -> list[int]:
        """The token ids that follow a call of the calculator: its result between the tokens `output`.

        expression: token ids of the call. Returns [] if the calculator refuses the expression, or if `output`
        is None.
        """
        result = calculate(self.tokenizer.decode(expression))
        if result is None or self.output is None:
            return []
        return [self.output[0], *self.tokenizer.encode(result), self.output[1]]


class SequenceState:
    """A sequence of tokens that is generated, with its cache.

    ids: token ids of the prompt and of the answer so far.
    prompt_tokens: the number of tokens of the prompt.
    sampling: how tokens are drawn. cache: keys and values of the tokens computed so far.
    slides: True: when the context is full, its older half is dropped; False: the sequence ends.
    reason: None while the sequence is generated; "stop" after a token that ends an answer, which is not in
        `ids`; "length" if max_tokens or the context is used up. The HTTP server sets other reasons after an
        error.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, cache: KVCache, slides: bool) -> None:
        self.ids = list(prompt)
        self.prompt_tokens = len(self.ids)
        self.sampling, self.cache, self.slides = sampling, cache, slides
        self.fresh = list(prompt)  # not in the cache yet
        self.forced: deque[int] = deque()
        self.expression: list[int] | None = None  # inside of a call of Python
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)
        self.reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether the sequence has ended."""
        return self.reason is not None

    @property
    def generated(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.ids) - self.prompt_tokens

    def draw(self, logits_V: Tensor) -> int:
        """Draw the id of the next token from the logits (V,), as `sampling` defines.

        The draw is made on the CPU, so that a seed gives the same draws on every device.
        """
        logits_V, sampling = logits_V.cpu(), self.sampling
        if sampling.temperature == 0:
            return int(logits_V.argmax())
        if 0 < sampling.top_k < logits_V.numel():
            values, ids = logits_V.topk(sampling.top_k)
        else:
            values, ids = logits_V, None
        drawn = torch.multinomial((values / sampling.temperature).softmax(-1), 1, generator=self.generator)
        return int(drawn if ids is None else ids[drawn])


@dataclass
class Engine:
    """Generates tokens with a model.

    model: the model. tools: special tokens and the calculator; None: no token ends a sequence, and there is
    no calculator. piece: the maximum number of tokens of a prompt in one model call. stop: ids of the tokens
    that end an answer, from `tools`.
    """

    model: GPT
    tools: Tools | None = None
    piece: int = PIECE
    stop: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop = self.tools.stop if self.tools else frozenset()

    @property
    def limit(self) -> int:
        """The context length of the model in tokens.

        It limits the length of a sequence, prompt and answer together, unless the sequence slides.
        """
        return self.model.config.sequence_len

    def start(self, prompt: Sequence[int], sampling: Sampling, slides: bool = False) -> SequenceState:
        """Create the state of a sequence that continues `prompt`, token ids. `step` computes its tokens.

        sampling: how tokens are drawn. slides: True: when the context is full, its older half is dropped;
        False: the sequence ends. Raises ContextOverflowError if the prompt fills the context and `slides` is
        False, ValueError if the prompt is empty.
        """
        if not prompt:
            raise ValueError("a prompt has at least one token")
        if slides:
            prompt = prompt[-self.limit :]
        elif len(prompt) >= self.limit:
            raise ContextOverflowError(
                f"The prompt has {len(prompt)} tokens, and the context of this model is {self.limit} tokens, "
                "those of the answer included. Shorten the conversation."
            )
        return SequenceState(prompt, sampling, self._cache(len(prompt) + 1), slides)

    @torch.inference_mode()
    def step(self, sequences: Sequence[SequenceState]) -> list[list[int]]:
        """Advance each sequence by one model call; returns a list of new token ids for each sequence.

        A sequence whose prompt is not computed yet has a model call of its own for the next piece of the
        prompt. All other sequences share one call, which gives each of them a token. The list of a sequence
        is empty while the prompt is not complete, if the drawn token ends the answer, and after the end.
        """
        logits: dict[int, Tensor] = {}
        decoding: list[int] = []
        for index, sequence in enumerate(sequences):
            if sequence.done:
                continue
            self._make_room(sequence)
            if len(sequence.fresh) == 1:
                decoding.append(index)
                continue
            piece, sequence.fresh = sequence.fresh[: self.piece], sequence.fresh[self.piece :]
            out = self._forward([piece], sequence.cache)
            if not sequence.fresh:
                logits[index] = out[0]
        if decoding:
            caches = [sequences[index].cache for index in decoding]
            out = self._forward(
                [sequences[index].fresh for index in decoding],
                caches[0] if len(caches) == 1 else KVCacheRows(caches),
            )
            logits.update(zip(decoding, out, strict=True))
        return [
            self._next(sequence, logits[index]) if index in logits else []
            for index, sequence in enumerate(sequences)
        ]

    def _forward(self, rows: list[list[int]], cache: Cache) -> Tensor:
        """The logits after the last token of each row: (B, V). rows: B lists of token ids, equally long."""
        out: Tensor = self.model(torch.tensor(rows, device=self.model.device), cache=cache, last_only=True)
        return out[:, -1]

    def _next(self, sequence: SequenceState, logits_V: Tensor) -> list[int]:
        """Choose the next token: from the calculator's result if one is queued, else drawn from logits (V,).

        Returns [token], or [] if the token ends the answer.
        """
        token = sequence.forced.popleft() if sequence.forced else sequence.draw(logits_V)
        if token in self.stop:
            sequence.reason = "stop"
            return []
        self._follow_python(sequence, token)
        sequence.ids.append(token)
        sequence.fresh = [token]
        full = len(sequence.ids) >= self.limit and not sequence.slides
        if full or sequence.generated >= sequence.sampling.max_tokens:
            sequence.reason = "length"
        return [token]

    def _follow_python(self, sequence: SequenceState, token: int) -> None:
        """Collect the tokens of a call of the calculator; at its end, queue the tokens of the result."""
        if self.tools is None or self.tools.python is None:
            return
        start, end = self.tools.python
        if token == start:
            sequence.expression = []
        elif token == end and sequence.expression is not None:
            sequence.forced.extend(self.tools.output_of(sequence.expression))
            sequence.expression = None
        elif sequence.expression is not None:
            sequence.expression.append(token)

    def _make_room(self, sequence: SequenceState) -> None:
        """Make the cache long enough for the next tokens; drop the older half of a full context."""
        cache = sequence.cache
        needed = cache.length + min(len(sequence.fresh), self.piece)
        if needed > self.limit:
            kept = sequence.ids[-(self.limit // 2) :]
            sequence.fresh, sequence.cache = kept, self._cache(len(kept) + 1)
        elif needed > cache.max_len:
            sequence.cache = self._cache(needed, cache)

    def _cache(self, needed: int, earlier: KVCache | None = None) -> KVCache:
        """A cache of at least `needed` tokens, in steps of GROWTH, with the content of an earlier one."""
        length = min(-(-needed // GROWTH) * GROWTH, self.limit)
        model = self.model
        cache = KVCache(model.config, 1, max(length, 1), model.compute_dtype, model.device)
        if earlier is not None:
            cache.k_LBHTE[:, :, :, : earlier.length] = earlier.k_LBHTE[:, :, :, : earlier.length]
            cache.v_LBHTE[:, :, :, : earlier.length] = earlier.v_LBHTE[:, :, :, : earlier.length]
            cache.advance(earlier.last_B1D, earlier.length)
        return cache


def run(engine: Engine, sequence: SequenceState) -> Iterable[int]:
    """Yield the tokens of one sequence until it ends."""
    while not sequence.done:
        yield from engine.step([sequence])[0]
