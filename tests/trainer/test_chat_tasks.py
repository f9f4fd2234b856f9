"""Chat tasks: letters by likelihood, generated answers by equality, on any number of ranks; bad lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_bundles import golden_model
from golden_chat import GOLDEN, byte_tokenizer
from test_core import AloneOf, one_rank

from trainer.chat.engine import Sampling
from trainer.data import DataError
from trainer.data.tokenizer import Tokenizer
from trainer.eval import sample
from trainer.eval.chat_tasks import (
    GREEDY,
    ChatTask,
    Question,
    complete,
    evaluate_task,
    likeliest_letter,
    read_task,
)
from trainer.model.gpt import GPT
from trainer.stages import BASE, SFT

CHOICES = ("bread", "stone", "rope")


@pytest.fixture(scope="module")
def model() -> GPT:
    return golden_model()


def written(folder: Path, *items: Any) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def test_an_answer_is_generated_as_nanochat_does(model: GPT) -> None:
    golden = GOLDEN["greedy"]
    found = list(complete(model, byte_tokenizer(), golden["prompt"], replace(GREEDY, max_tokens=40)))
    assert golden["prompt"] + found == golden["result"]


def test_a_question_is_asked_with_its_choices() -> None:
    tokenizer = byte_tokenizer()
    ids = Question("What is eaten?", CHOICES, "A").prompt(tokenizer)
    starts = [tokenizer.specials[name] for name in ("<|bos|>", "<|user_start|>")]
    ends = [tokenizer.specials[name] for name in ("<|user_end|>", "<|assistant_start|>")]
    assert (ids[:2], ids[-2:]) == (starts, ends)
    text = tokenizer.decode(ids[2:-2])
    assert text.splitlines()[1:4] == ["- bread=A", "- stone=B", "- rope=C"]
    assert "What is eaten?" in text.splitlines()[0]


def test_the_letter_with_the_highest_logit_is_the_answer(model: GPT) -> None:
    tokenizer = byte_tokenizer()
    prompt = Question("What is eaten?", CHOICES, "A").prompt(tokenizer)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    scores = {letter: logits[ord(letter)].item() for letter in "ABC"}
    assert likeliest_letter(model, tokenizer, prompt, "ABC") == max(scores, key=scores.__getitem__)


def test_right_answers_are_counted_on_any_number_of_ranks(model: GPT) -> None:
    tokenizer = byte_tokenizer()
    asked = [Question(f"What is {number}?", CHOICES, "A") for number in range(20)]
    right = [likeliest_letter(model, tokenizer, each.prompt(tokenizer), "ABC") for each in asked]
    wrong = {"A": "B", "B": "C", "C": "A"}
    answers = [letter if number % 4 else wrong[letter] for number, letter in enumerate(right)]
    pairs = zip(asked, answers, strict=True)
    task = ChatTask("t", tuple(Question(each.question, CHOICES, answer) for each, answer in pairs), "")
    result = evaluate_task(model, tokenizer, task, one_rank())
    assert (result.correct, result.items) == (15, 20)
    assert result.centered == pytest.approx((0.75 - 1 / 3) / (1 - 1 / 3))
    parts = [evaluate_task(model, tokenizer, task, AloneOf(rank, 3)) for rank in range(3)]
    assert sum(part.correct for part in parts) == 15


def test_a_generated_answer_is_compared_without_blanks_at_its_ends(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.eval import chat_tasks

    tokenizer = byte_tokenizer()
    end = tokenizer.specials["<|assistant_end|>"]
    printed = {42: " forty ", 43: "fifty", 44: "forty-two", 45: "sixty"}
    seeds: list[int] = []

    def speak(model: GPT, tokens: list[int], sampling: Sampling) -> Any:
        assert sampling.seed is not None
        seeds.append(sampling.seed)
        yield from [*printed[sampling.seed].encode(), end, *b"more"]

    monkeypatch.setattr(chat_tasks, "generate", speak)
    task = ChatTask("t", (Question("a?", (), "forty"), Question("b?", (), "forty-two")), "")
    greedy = evaluate_task(model, tokenizer, task, one_rank(), samples=5)
    assert (greedy.correct, greedy.items, greedy.centered, seeds) == (1, 2, 0.5, [42, 43])
    several = evaluate_task(model, tokenizer, task, one_rank(), replace(GREEDY, temperature=0.6), 2)
    assert several.correct == 2


def test_the_answer_is_an_index_or_a_letter(tmp_path: Path) -> None:
    lines = [{"question": "q", "choices": ["a", "b"], "answer": answer} for answer in (1, "B", 0, "A")]
    task = read_task(written(tmp_path, *lines))
    assert [question.answer for question in task.questions] == ["B", "B", "A", "A"]
    assert (task.name, task.is_categorical, task.baseline) == ("questions", True, 0.5)
    assert read_task(written(tmp_path, {"question": "q", "answer": "x"})).baseline == 0


@pytest.mark.parametrize(
    ("item", "printed"),
    [
        ({"answer": "x"}, "the item lacks question"),
        ({"question": "q"}, "answer is None: without choices it takes a text"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "choices is no list of 2 to 26 texts"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer is 2: it takes an index from 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "or a letter from A to B"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer is True"),
        ({"question": "q", "choices": ["a", "b"], "answer": 0}, "Split it into two files"),
        ([], "the item lacks question"),
    ],
)
def test_a_bad_line_is_named(item: Any, printed: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "q", "answer": "x"}, item)
    with pytest.raises(DataError) as refused:
        read_task(path)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert printed in str(refused.value)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no question"):
        read_task(written(tmp_path))
    with pytest.raises(DataError, match="Cannot read the questions"):
        read_task(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(b"{}\n\xff")
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        read_task(tmp_path / "bad.jsonl")


def test_a_letter_of_several_tokens_is_refused(model: GPT) -> None:
    class Splitting(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return [0, 1]

    with pytest.raises(DataError, match="splits the letter A into 2 tokens"):
        likeliest_letter(model, Splitting([bytes([value]) for value in range(256)]), [1], "AB")


def test_the_sample_of_a_fine_tuned_model_is_an_answer(model: GPT) -> None:
    tokenizer = byte_tokenizer()
    base, tuned = (sample.sample(model, tokenizer, stage) for stage in (BASE, SFT))
    assert base.startswith(sample.PROMPT)
    question, answer = tuned.split("\n", 1)
    assert question == f"user: {sample.QUESTION}"
    assert answer.startswith("assistant: ")
    assert tuned == sample.sample(model, tokenizer, SFT), "the same each time"
