"""The prompts of a CORE item as tokens, and the span of each that is scored.

    prompts = make_prompts(task, number, tokenizer, limit=10_240)
    prompts[0].tokens[prompts[0].start :]    # the tokens whose losses count

A prompt shows `fewshot` other items with their right answers, then the item itself. The choice of the other
items, the texts and the spans are those of nanochat's core_eval.py (commit 92d63d4), so that equal weights
give equal answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.tokenizer import Tokenizer
from trainer.eval.core_bundle import CHOICE, LANGUAGE, OPTIONS, SCHEMA, Item, Task

FEWSHOT_SEED = 1234  # plus the number of the item
BETWEEN = "\n\n"  # after an example


@dataclass(frozen=True)
class Prompt:
    """A prompt of an item of CORE.

    tokens: token ids of the prompt, from BOS on unless its start was cut off. start: index of the first
    scored token, 1 or more. This token and all after it are scored: the model predicts each from the tokens
    before it.
    """

    tokens: Sequence[int]
    start: int


def make_prompts(task: Task, number: int, tokenizer: Tokenizer, limit: int) -> list[Prompt]:
    """The prompts of one item of `task`: one per option, or a single one if the item has no options.

    number: index of the item. limit: the most tokens of a prompt; of a longer prompt, the last `limit` tokens
    are kept.
    """
    texts = _texts(task, number)
    tokens = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    if task.kind == CHOICE:
        first = common_prefix(tokens)
        prompts = [Prompt(ids, first) for ids in tokens]
    elif task.kind == SCHEMA:
        length = common_suffix(tokens)
        prompts = [Prompt(ids, len(ids) - length) for ids in tokens]
    else:
        # With most tokenizers the second list begins with the whole first list. If it does not, the tokens
        # from the first difference on are scored; nanochat refuses such an item.
        prompts = [Prompt(tokens[1], common_prefix(tokens))]
    return [_cropped(prompt, limit) for prompt in prompts]


def prompt_cost(task: Task, number: int) -> int:
    """An estimate of the work of an item of `task`, to compare items. number: index of the item.

    The result is the number of prompts of the item times the characters of the longest prompt, because the
    other prompts are padded to its length.
    """
    texts = _texts(task, number)
    prompts = 1 if task.kind == LANGUAGE else len(texts)
    return prompts * max(map(len, texts))


def _texts(task: Task, number: int) -> list[str]:
    """The texts of the prompts of item `number`, one per option.

    For an item without options: the prompt without the answer, and the prompt with the answer.
    """
    item = task.items[number]
    examples = [task.items[other] for other in _sample(len(task.items), number, task.fewshot)]
    shown = "".join(_solved(task, example) + BETWEEN for example in examples)
    if task.kind == CHOICE:
        return [shown + item["query"] + task.delimiter + choice for choice in item["choices"]]
    if task.kind == SCHEMA:
        end = task.delimiter + item["continuation"]
        return [shown + context + end for context in item["context_options"]]
    before = shown + item["context"].strip() + task.delimiter
    # Blanks at its end would be in the first token of the continuation.
    return [before.strip(), before + item["continuation"]]


def _sample(n_items: int, number: int, count: int) -> list[int]:
    """Indices of the `count` items, out of `n_items`, that are shown before item `number`, in order."""
    if not count:
        return []
    others = [other for other in range(n_items) if other != number]
    return random.Random(FEWSHOT_SEED + number).sample(others, count)


def _solved(task: Task, item: Item) -> str:
    """The text of an item with its right answer."""
    if task.kind == LANGUAGE:
        return str(item["context"].strip() + task.delimiter + item["continuation"])
    option = item[OPTIONS[task.kind]][item["gold"]]
    if task.kind == CHOICE:
        return str(item["query"] + task.delimiter + option)
    return str(option + task.delimiter + item["continuation"])


def common_prefix(lists: Sequence[Sequence[int]]) -> int:
    """The length of the longest common prefix of all lists, in tokens."""
    shortest = min(map(len, lists))
    return next((i for i in range(shortest) if len({ids[i] for ids in lists}) > 1), shortest)


def common_suffix(lists: Sequence[Sequence[int]]) -> int:
    """The length of the longest common suffix of all lists, in tokens."""
    return common_prefix([ids[::-1] for ids in lists])


def _cropped(prompt: Prompt, limit: int) -> Prompt:
    """The last `limit` tokens of a prompt. The first of them has nothing before it and is not scored."""
    cut = max(0, len(prompt.tokens) - limit)
    return Prompt(prompt.tokens[cut:], max(1, prompt.start - cut))
