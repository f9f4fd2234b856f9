"""The CORE metric of DCLM (arXiv 2406.11794), computed by all ranks as nanochat computes it.

    result = evaluate_core(model, tokenizer, bundle, group)
    result.metric, result.tasks["hellaswag"].accuracy

The ranks divide the items (questions) of a task, one block of items after another. The prompts of each item
are a batch of their own, so that the result is the same for any number of ranks. After each block the ranks
add up their right answers: a fast rank waits for a slower rank at most for the time of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.eval.core_bundle import CHOICE, LANGUAGE, OPTIONS, SCHEMA, Bundle, Task
from trainer.eval.core_prompts import Prompt, make_prompts, prompt_cost
from trainer.eval.striping import add_up, blocks, own_items
from trainer.formatting import render_table
from trainer.model.gpt import GPT

# nanochat's models take prompts of this many times sequence_len: its rotary tables have that length.
LONGEST_CONTEXT = 10


@dataclass(frozen=True)
class TaskResult:
    """The result of a task of CORE or ChatCORE.

    correct: the number of items that the model answered right. items: the number of all items. centered: the
    accuracy on a scale on which guessing is 0 and all right is 1.
    """

    correct: int
    items: int
    centered: float

    @property
    def accuracy(self) -> float:
        """The share of the items that were answered right, from 0 to 1."""
        return self.correct / self.items

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values: accuracy, centered, correct and items."""
        figures = {"correct": self.correct, "items": self.items}
        return {"accuracy": self.accuracy, "centered": self.centered, **figures}


class HasScale(Protocol):
    """A task that can convert an accuracy to the field `centered` of TaskResult."""

    def centered(self, accuracy: float) -> float: ...


def task_result(task: HasScale, correct: int, items: int) -> TaskResult:
    """The result of `task` if `correct` of `items` items are answered right."""
    return TaskResult(correct, items, task.centered(correct / items))


@dataclass(frozen=True)
class CoreResult:
    """The result of an evaluation of CORE. tasks: {label of a task: result}, in the order of core.yaml."""

    tasks: Mapping[str, TaskResult] = field(default_factory=dict)

    @property
    def metric(self) -> float:
        """The CORE metric: the mean of the centered accuracies."""
        return sum(result.centered for result in self.tasks.values()) / len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values.

        core_metric: the CORE metric. tasks: {label: dict with accuracy, centered, correct and items}.
        """
        tasks = {label: result.to_dict() for label, result in self.tasks.items()}
        return {"core_metric": self.metric, "tasks": tasks}

    def describe(self) -> str:
        """The result as text: the metric, then a table of the accuracies of all tasks."""
        rows: list[list[Any]] = [["task", "items", "accuracy", "centered"]]
        rows += [
            [label, each.items, f"{each.accuracy:.4f}", f"{each.centered:.4f}"]
            for label, each in self.tasks.items()
        ]
        rows.append(["CORE", "", "", f"{self.metric:.4f}"])
        return f"CORE metric {self.metric:.4f}\n{render_table(rows)}"

    def to_csv(self) -> str:
        """The result as CSV in nanochat's format: a header, a line per task, and a line with the metric."""
        rows = [("Task", "Accuracy", "Centered")]
        rows += [(label, f"{r.accuracy:.6f}", f"{r.centered:.6f}") for label, r in self.tasks.items()]
        rows.append(("CORE", "", f"{self.metric:.6f}"))
        return "".join(f"{label:<35}, {accuracy:<10}, {centered:<10}\n" for label, accuracy, centered in rows)


@dataclass(frozen=True)
class BlockProgress:
    """How far an evaluation of CORE is when a block of items begins.

    task: label of the current task.
    done: number of finished items of this task. items: number of all items of this task.
    part: estimated share of the evaluation that is done, from 0 to 1.
    seconds: seconds since the evaluation began.
    block_tokens: number of tokens of the block, padding included, on the rank that has the most of them.
    """

    task: str
    done: int
    items: int
    part: float
    seconds: float
    block_tokens: int

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the evaluation is done; None at its start."""
        return self.seconds / self.part * (1 - self.part) if self.part else None


class StoppedEvaluationError(Exception):
    """Raised on all ranks if `should_stop` of `evaluate_core` returned True on one of them."""


def ignore(*_: Any) -> None:
    """A callback that does nothing: the default of `on_block` and `on_task` of `evaluate_core`."""


@torch.no_grad()
def evaluate_core(
    model: GPT,
    tokenizer: Tokenizer,
    bundle: Bundle,
    group: Collectives,
    finished: Mapping[str, TaskResult] | None = None,
    on_block: Callable[[BlockProgress], None] = ignore,
    on_task: Callable[[str, TaskResult, float], None] = ignore,
    shares: Sequence[int] = (),
    should_stop: Callable[[], bool] = bool,
) -> CoreResult:
    """Evaluate all tasks of `bundle`. A collective call; every rank returns the same result.

    group: the ranks.
    finished: {label: result} of tasks that are not evaluated again, equal on all ranks; None: no task.
    on_block: called before each block of items, with the progress.
    on_task: called after each task, with its label, its result, and the seconds that it took.
    shares: proportions in which the ranks divide the items; empty: equal parts.
    should_stop: called after each block. If it returns True on a rank, all ranks raise
        StoppedEvaluationError.
    """
    results = dict(finished or {})
    open_tasks = [task for task in bundle.tasks if task.label not in results]
    works = [work_of(task) for task in open_tasks]
    began = time.monotonic()
    with model.longer_context(LONGEST_CONTEXT * model.config.sequence_len):
        for number, task in enumerate(open_tasks):
            started, correct = time.monotonic(), 0
            for block in blocks(len(task.items), group):
                costs = [prompt_cost(task, i) for i in block]
                numbers = own_items(block, group, costs, shares)
                mine = [make_prompts(task, i, tokenizer, model.cos.size(0)) for i in numbers]
                part = (sum(works[:number]) + works[number] * block[0] / len(task.items)) / sum(works)
                tokens = _most_tokens(group, mine)
                seconds = time.monotonic() - began
                on_block(BlockProgress(task.label, block[0], len(task.items), part, seconds, tokens))
                began_block = time.monotonic()
                answers = [
                    _is_correct(model, task, task.items[i].get("gold", 0), prompts)
                    for i, prompts in zip(numbers, mine, strict=True)
                ]
                right, stops = add_up(group, began_block, sum(answers), should_stop())
                if stops:
                    raise StoppedEvaluationError
                correct += right
            results[task.label] = task_result(task, correct, len(task.items))
            on_task(task.label, results[task.label], time.monotonic() - started)
    return CoreResult({task.label: results[task.label] for task in bundle.tasks})


def work_of(task: Task) -> float:
    """An estimate of the work of `task`, to compare tasks: the number of characters in all its prompts."""
    fields = {CHOICE: "query", SCHEMA: "continuation", LANGUAGE: "context"}
    characters, prompts = 0, 0
    for item in task.items:
        options = item.get(OPTIONS.get(task.kind, ""), [item.get("continuation", "")])
        characters += len(item[fields[task.kind]]) + sum(map(len, options)) // len(options)
        prompts += len(options) if task.kind != LANGUAGE else 1
    return max(1.0, characters / len(task.items) * (1 + task.fewshot) * prompts)


def _most_tokens(group: Collectives, mine: list[list[Prompt]]) -> int:
    """The number of tokens, padding included, on the rank that has the most. A collective call.

    mine: for each item of this rank, its prompts.
    """
    tokens = sum(len(prompts) * max(len(prompt.tokens) for prompt in prompts) for prompts in mine)
    return int(group.gather_int64(torch.tensor([tokens])).max())


def _is_correct(model: GPT, task: Task, gold: int, prompts: list[Prompt]) -> bool:
    """Whether the model answers the item with these prompts right. gold: index of the right option."""
    spans = score_prompts(model, prompts)
    if task.kind == LANGUAGE:
        return spans[0].exact
    losses = [span.loss for span in spans]
    return min(range(len(losses)), key=losses.__getitem__) == gold  # the first of equals


@dataclass(frozen=True)
class Span:
    """The scores of one prompt of an item of CORE.

    loss: mean loss of the scored tokens, in nats per token; nan if no token is scored. exact: whether each
    scored token is the one with the highest logit.
    """

    loss: float
    exact: bool


def score_prompts(model: GPT, prompts: list[Prompt]) -> list[Span]:
    """Score the prompts of one item in one batch; returns the scores of each prompt, in order.

    Shorter prompts are padded at their ends. The padding follows the scored tokens and changes no score.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    ids = torch.full((len(prompts), longest), prompts[0].tokens[0])
    chosen = torch.zeros(ids.shape, dtype=torch.bool)  # the position before each scored token predicts it
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
        chosen[row, prompt.start - 1 : len(prompt.tokens) - 1] = True
    logits = model.logits_at(ids.to(model.device), chosen.to(model.device))
    targets = ids.roll(-1, 1)[chosen].to(model.device)
    losses = F.cross_entropy(logits, targets, reduction="none").cpu()
    hits = (logits.argmax(-1) == targets).cpu()
    lengths = chosen.sum(1).tolist()
    return [_span(*parts) for parts in zip(losses.split(lengths), hits.split(lengths), strict=True)]


def _span(losses: Tensor, hits: Tensor) -> Span:
    return Span(losses.mean().item(), bool(hits.all()))
