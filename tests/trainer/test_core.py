"""CORE gives nanochat's figures for golden_chat.json, with any number of ranks; prompts and spans."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from core_bundles import golden_bundle, golden_model
from golden_chat import GOLDEN, byte_tokenizer

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.eval import core
from trainer.eval.core import TaskResult, evaluate_core, score_prompts
from trainer.eval.core_bundle import Bundle, Task, read_bundle
from trainer.eval.core_prompts import Prompt, make_prompts
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT

TASKS = {task["label"]: task for task in GOLDEN["core"]["tasks"]}


@pytest.fixture(scope="module")
def model() -> GPT:
    return golden_model()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read_bundle(golden_bundle(tmp_path / "core"))


def one_rank() -> Collectives:
    return Collectives(RankEnv(), [])


@pytest.mark.parametrize("label", TASKS)
def test_each_answer_is_that_of_nanochat(label: str, model: GPT, bundle: Bundle) -> None:
    (task,) = (task for task in bundle.tasks if task.label == label)
    found = [
        core._is_correct(model, task, item.get("gold", 0), make_prompts(task, i, byte_tokenizer(), 2560))
        for i, item in enumerate(task.items)
    ]
    assert found == TASKS[label]["correct_in_shuffled_order"]


def test_the_metric_is_that_of_nanochat(model: GPT, bundle: Bundle) -> None:
    result = evaluate_core(model, byte_tokenizer(), bundle, one_rank())
    assert {label: each.accuracy for label, each in result.tasks.items()} == {
        label: task["accuracy"] for label, task in TASKS.items()
    }
    assert result.metric == pytest.approx(GOLDEN["core"]["core_metric"], abs=1e-12)


def test_padding_does_not_change_an_answer(model: GPT, bundle: Bundle) -> None:
    for task in bundle.tasks:
        prompts = make_prompts(task, 0, byte_tokenizer(), 2560)
        together = score_prompts(model, prompts)
        alone = [score_prompts(model, [prompt])[0] for prompt in prompts]
        assert [span.exact for span in together] == [span.exact for span in alone]
        assert [span.loss for span in together] == pytest.approx([span.loss for span in alone], rel=1e-6)


def test_the_result_is_the_same_for_any_number_of_ranks(model: GPT, bundle: Bundle) -> None:
    """Each rank by itself; their answers are added here."""
    whole = evaluate_core(model, byte_tokenizer(), bundle, one_rank())
    for world_size in (2, 3, 5):
        correct = dict.fromkeys(TASKS, 0)
        for rank in range(world_size):
            part = evaluate_core(model, byte_tokenizer(), bundle, AloneOf(rank, world_size))
            for label, result in part.tasks.items():
                correct[label] += result.correct
        assert correct == {label: result.correct for label, result in whole.tasks.items()}


class AloneOf(Collectives):
    """A rank whose sums have only its own values."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(RankEnv(rank=rank, world_size=world_size), [])

    def all_reduce(self, tensors: Any) -> None:
        pass

    def gather_int64(self, values: torch.Tensor) -> torch.Tensor:
        return values[None]


def test_results_of_finished_tasks_are_taken(model: GPT, bundle: Bundle) -> None:
    evaluated: list[str] = []
    known = {"schema": TaskResult(1, 4, -0.5)}
    result = evaluate_core(
        model, byte_tokenizer(), bundle, one_rank(), known, on_task=lambda label, *_: evaluated.append(label)
    )
    assert evaluated == ["mc", "lm"]
    assert result.tasks["schema"] == known["schema"]
    assert list(result.tasks) == ["mc", "schema", "lm"]


def test_the_progress_reaches_the_end(model: GPT, bundle: Bundle) -> None:
    seen: list[core.Progress] = []
    evaluate_core(model, byte_tokenizer(), bundle, one_rank(), on_block=seen.append)
    assert [each.task for each in seen] == ["mc", "schema", "lm"]
    assert seen[0].seconds_left is None
    parts = [each.part for each in seen]
    assert parts == sorted(parts)
    assert 0 < parts[-1] < 1
    assert all(each.block_tokens > 0 for each in seen)


def test_the_table_is_that_of_nanochat(model: GPT, bundle: Bundle) -> None:
    lines = evaluate_core(model, byte_tokenizer(), bundle, one_rank()).to_csv().splitlines()
    assert [[cell.strip() for cell in line.split(",")] for line in lines] == [
        ["Task", "Accuracy", "Centered"],
        ["mc", "0.500000", "0.250375"],
        ["schema", "0.666667", "0.333333"],
        ["lm", "0.000000", "0.000000"],
        ["CORE", "", "0.194569"],
    ]


# -- prompts -----------------------------------------------------------------------------------------------


def task(kind: str, items: list[dict[str, Any]], fewshot: int = 0, delimiter: str = " ") -> Task:
    return Task("some", kind, fewshot, delimiter, 25.0, items)


def texts(prompts: list[Prompt]) -> list[tuple[str, str]]:
    """Of each prompt what stands before the span, and the span."""
    tokenizer = byte_tokenizer()
    return [
        (tokenizer.decode(prompt.tokens[1 : prompt.start]), tokenizer.decode(prompt.tokens[prompt.start :]))
        for prompt in prompts
    ]


def test_choices_are_scored_from_where_they_differ() -> None:
    items = [{"query": "1 and 1?", "choices": ["two", "ten"], "gold": 0}]
    prompts = make_prompts(task("multiple_choice", items, delimiter="\nA: "), 0, byte_tokenizer(), 999)
    assert texts(prompts) == [("1 and 1?\nA: t", "wo"), ("1 and 1?\nA: t", "en")]
    assert prompts[0].tokens[0] == byte_tokenizer().bos_id


def test_contexts_are_scored_by_what_they_have_in_common() -> None:
    items = [{"context_options": ["The cat", "The coat"], "continuation": "is wet.", "gold": 0}]
    prompts = make_prompts(task("schema", items), 0, byte_tokenizer(), 999)
    assert texts(prompts) == [("The c", "at is wet."), ("The co", "at is wet.")]


def test_a_continuation_is_scored_after_the_prompt_without_its_last_blanks() -> None:
    items = [{"context": "  one two ", "continuation": "three"}]
    assert texts(make_prompts(task("language_modeling", items), 0, byte_tokenizer(), 999)) == [
        ("one two", " three")
    ]


def test_a_tokenizer_that_joins_the_continuation_is_scored_from_the_first_difference() -> None:
    class Joining(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return [7] if text == "ab" else list(text.encode())

    joining = Joining([bytes([value]) for value in range(256)])
    items = [{"context": "a", "continuation": "b"}]
    (prompt,) = make_prompts(task("language_modeling", items, delimiter=""), 0, joining, 999)
    assert (prompt.tokens, prompt.start) == ([joining.bos_id, 7], 1)


def test_examples_are_other_items_with_their_answers() -> None:
    items = [{"query": f"q{i}", "choices": ["no", "yes"], "gold": i % 2} for i in range(4)]
    (first, _) = texts(make_prompts(task("multiple_choice", items, fewshot=3), 2, byte_tokenizer(), 999))
    *examples, own = (first[0] + first[1]).split("\n\n")
    assert own == "q2 no"
    assert sorted(examples) == ["q0 no", "q1 yes", "q3 yes"]
    assert examples == ["q3 yes", "q1 yes", "q0 no"]  # as random.Random(1234 + 2) draws them


def test_a_long_prompt_keeps_its_end() -> None:
    items = [{"context": "x" * 50, "continuation": "three"}]
    (prompt,) = make_prompts(task("language_modeling", items), 0, byte_tokenizer(), 10)
    assert texts([Prompt((0, *prompt.tokens), prompt.start + 1)]) == [("xxxx", " three")]
    (prompt,) = make_prompts(task("language_modeling", items), 0, byte_tokenizer(), 4)
    assert (len(prompt.tokens), prompt.start) == (4, 1)


def test_prompts_longer_than_the_context_of_the_training_are_evaluated(model: GPT) -> None:
    short = copy.deepcopy(model)
    ids = torch.arange(300)[None] % 256
    with pytest.raises(ValueError, match="300 tokens do not fit"):
        short(ids)
    with short.longer_context(2560):
        assert short(ids).shape == (1, 300, 265)
        assert torch.equal(short(ids[:, :200]), model(ids[:, :200]))
    with pytest.raises(ValueError, match="at most 256 here"):
        short(ids)


def test_logits_of_chosen_positions_are_those_of_all(model: GPT) -> None:
    ids = torch.arange(40).view(2, 20)
    chosen = torch.zeros(2, 20, dtype=torch.bool)
    chosen[0, 3:7] = chosen[1, 19] = True
    with torch.no_grad():
        assert torch.allclose(model.logits_at(ids, chosen), model(ids)[chosen], atol=1e-6)
