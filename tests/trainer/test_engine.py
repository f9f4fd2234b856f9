"""Generation with a cache gives the tokens of generation without one, alone and in a batch."""

from __future__ import annotations

import pytest
import reference
import torch
from golden_chat import GOLDEN, byte_tokenizer

from trainer.chat.calculator import calculate
from trainer.chat.engine import ContextOverflowError, Engine, Sampling, SequenceState, Tools, run
from trainer.model.gpt import GPT, GPTConfig

GREEDY = Sampling(temperature=0, max_tokens=40)


def model_of(pattern: str, n_layer: int = 3, sequence_len: int = 300, seed: int = 1) -> GPT:
    config = GPTConfig(sequence_len, 265, n_layer, 2, 1, 32, pattern)
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.eval()


@torch.inference_mode()
def without_cache(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(engine: Engine, sequences: list[SequenceState]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in sequences]
    while not all(sequence.done for sequence in sequences):
        for tokens, new in zip(found, engine.step(sequences), strict=True):
            tokens += new
    return found


def test_the_golden_answer_of_nanochat() -> None:
    golden = GOLDEN["greedy"]
    model = GPT(GPTConfig(**GOLDEN["config"]))
    model.init_weights()
    reference.fill_by_formula(model)
    engine = Engine(model.eval(), Tools.of(byte_tokenizer()))
    sequence = engine.start(golden["prompt"], Sampling(temperature=0, max_tokens=golden["max_tokens"]))
    list(run(engine, sequence))
    assert sequence.ids == golden["result"]


@pytest.mark.parametrize("pattern", ["L", "S", "SL", "SSSL"])
def test_a_cache_changes_no_token(pattern: str) -> None:
    """Prompts end before, at and after the window of 128 tokens."""
    model = model_of(pattern)
    for length in (1, 120, 128, 200):
        engine = Engine(model, piece=50)
        prompt = prompt_of(length)
        assert list(run(engine, engine.start(prompt, GREEDY))) == without_cache(model, prompt, 40)


def test_sequences_of_different_length_decode_together() -> None:
    model = model_of("SL")
    prompts = [prompt_of(length, length) for length in (3, 150, 40)]
    engine = Engine(model, piece=64)
    found = finish(engine, [engine.start(prompt, GREEDY) for prompt in prompts])
    assert found == [without_cache(model, prompt, 40) for prompt in prompts]


def test_a_sequence_may_join_while_others_decode() -> None:
    model = model_of("SSL")
    engine = Engine(model)
    first, late = engine.start(prompt_of(9), GREEDY), prompt_of(130, 4)
    for _ in range(7):
        engine.step([first])
    second = engine.start(late, GREEDY)
    finish(engine, [first, second])
    assert second.ids[130:] == without_cache(model, late, 40)
    assert first.ids[9:] == without_cache(model, prompt_of(9), 40)


def test_a_full_context_ends_the_answer() -> None:
    model = model_of("L", sequence_len=32)
    engine = Engine(model)
    sequence = engine.start(prompt_of(20), GREEDY)
    assert len(list(run(engine, sequence))) == 12
    assert sequence.reason == "length"
    with pytest.raises(ContextOverflowError, match="has 32 tokens, and the context of this model is 32"):
        engine.start(prompt_of(32), GREEDY)


def test_a_sliding_context_goes_on() -> None:
    model = model_of("L", sequence_len=32)
    engine = Engine(model)
    assert len(list(run(engine, engine.start(prompt_of(50), GREEDY, slides=True)))) == 40


def test_seeds_and_top_k_bound_the_draws() -> None:
    model = model_of("L")
    engine = Engine(model)

    def draw(seed: int, top_k: int) -> list[int]:
        return list(run(engine, engine.start([1, 2], Sampling(1.0, top_k, 20, seed))))

    assert draw(1, 0) == draw(1, 0) != draw(2, 0)
    assert draw(5, 1) == without_cache(model, [1, 2], 20)


class Scripted(Engine):
    """Its sequences draw the tokens of `script`, and only forced tokens are others."""

    script: list[int]

    def _next(self, sequence: SequenceState, logits_V: torch.Tensor) -> list[int]:
        if not sequence.forced:
            logits_V = torch.nn.functional.one_hot(torch.tensor(self.script.pop(0)), 265).float()
        return super()._next(sequence, logits_V)


def test_the_result_of_the_calculator_is_forced() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.specials
    call = [ids["<|python_start|>"], *tokenizer.encode("2*(3+4)"), ids["<|python_end|>"]]
    engine = Scripted(model_of("L"), Tools.of(tokenizer))
    engine.script = [*call, *tokenizer.encode("!"), ids["<|assistant_end|>"]]
    sequence = engine.start([ids["<|bos|>"]], GREEDY)
    output = [ids["<|output_start|>"], *tokenizer.encode("14"), ids["<|output_end|>"]]
    assert list(run(engine, sequence)) == [*call, *output, *tokenizer.encode("!")]
    assert sequence.reason == "stop"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1,200 * 3", "3600"),
        ("(1 + 2) / 4", "0.75"),
        ("-2 - -3", "1"),
        ("'strawberry'.count('r')", "3"),
        ('"a, b".count(",")', "1"),
        ("2 ** 8", None),
        ("7 // 2", None),
        ("1 / 0", None),
        ("__import__('os')", None),
        ("'a'.upper()", None),
        ("'a' * 99", None),
        ("9" * 150, None),
        ("(" * 150 + ")" * 150, None),
        ("1" * 201, None),
        ("(1).real", None),
        ("", None),
    ],
)
def test_the_calculator_computes_only_what_it_knows(text: str, result: str | None) -> None:
    assert calculate(text) == result
