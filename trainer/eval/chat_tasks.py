"""Chat tasks: reads files of questions for a model that was tuned to chat, and counts its right answers.

    task = read_task(Path("questions.jsonl"))
    result = evaluate_task(model, tokenizer, task, group)

Each line of a file is a JSON object, a question. There are two kinds of tasks:

categorical   fields question, choices, and answer: the index or letter of the right choice. The answer of the
              model is the letter with the highest logit after the prompt, as in nanochat's chat_eval.
generative    fields question, and answer: a text. The model generates one answer or several. The question
              counts as answered right if one of them equals the text, apart from white space at its ends.
"""

from __future__ import annotations

import hashlib
import json
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.chat.engine import Sampling
from trainer.data import DataError
from trainer.data.conversations import render_for_completion, special
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.eval.core import LONGEST_CONTEXT, TaskResult, ignore, task_result
from trainer.eval.sample import generate
from trainer.eval.striping import add_up, blocks, own_items
from trainer.model.gpt import GPT

LETTERS = string.ascii_uppercase
# The prompt of nanochat's multiple-choice tasks: a model that was tuned on them knows no other.
BEFORE, CHOICE = "Multiple Choice question: {question}\n", "- {choice}={letter}\n"
AFTER = "\nRespond only with the letter of the correct answer."
END = "<|assistant_end|>"
GREEDY = Sampling(temperature=0.0, top_k=0, max_tokens=256, seed=42)


@dataclass(frozen=True)
class Question:
    """A question for a model that was tuned to chat.

    question: the text of the question. choices: the texts of the choices; empty for a question without
    choices. answer: the letter of the right choice; for a question without choices, the expected text.
    """

    question: str
    choices: tuple[str, ...]
    answer: str

    @property
    def letters(self) -> str:
        """The letters of the choices, such as "ABCD"; "" without choices."""
        return LETTERS[: len(self.choices)]

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt: the question as a user message, then the token <|assistant_start|>."""
        text = self.question
        if self.choices:
            lines = [
                CHOICE.format(choice=choice, letter=letter)
                for choice, letter in zip(self.choices, self.letters, strict=True)
            ]
            text = BEFORE.format(question=self.question) + "".join(lines) + AFTER
        return render_for_completion([{"role": "user", "content": text}], tokenizer)


@dataclass(frozen=True)
class ChatTask:
    """The questions of a file, all with choices or all without.

    name: name of the file without its extension. questions: the questions in the order of the file. digest:
    sha256 (hex) of the file.
    """

    name: str
    questions: tuple[Question, ...]
    digest: str

    @property
    def is_categorical(self) -> bool:
        """Whether the questions have choices."""
        return bool(self.questions[0].choices)

    @property
    def baseline(self) -> float:
        """The accuracy of guessing, from 0 to 1; 0 for a generative task."""
        if not self.is_categorical:
            return 0.0
        return sum(1 / len(question.choices) for question in self.questions) / len(self.questions)

    def centered(self, accuracy: float) -> float:
        """`accuracy`, from 0 to 1, on a scale on which guessing is 0 and all right is 1."""
        return (accuracy - self.baseline) / (1 - self.baseline)


def read_task(path: Path) -> ChatTask:
    """Read the questions in the file `path`, which has one JSON object per line.

    Raises DataError if the file cannot be read or has no question, if a line is no valid question, or if only
    some questions have choices. The message names the file and, if there is one, the invalid line.
    """
    try:
        raw = path.read_bytes()
        lines = raw.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"Cannot read the questions {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8.") from None
    questions = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            where = f"{path}, line {number}"
            questions.append(_question(where, text))
            if bool(questions[-1].choices) != bool(questions[0].choices):
                raise DataError(
                    f"{where}: this file has questions with choices and questions without choices. Split "
                    "it into two files."
                )
    if not questions:
        raise DataError(f"{path} has no question: a line is an object with question, answer and choices.")
    return ChatTask(path.stem, tuple(questions), hashlib.sha256(raw).hexdigest())


def _question(where: str, text: str) -> Question:
    """The question in the line `text`. where: file and line number, for messages.

    Raises DataError if the line is no valid question.
    """
    try:
        item = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}).") from None
    if not isinstance(item, dict) or not isinstance(item.get("question"), str):
        raise DataError(f"{where}: the item lacks question, a text.")
    question, answer = item["question"], item.get("answer")
    if "choices" not in item:
        if not isinstance(answer, str) or not answer.strip():
            raise DataError(f"{where}: answer is {answer!r}: without choices it takes a text.")
        return Question(question, (), answer)
    choices = item["choices"]
    texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not texts or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f"{where}: choices is no list of 2 to {len(LETTERS)} texts.")
    letters = LETTERS[: len(choices)]
    if type(answer) is int and 0 <= answer < len(choices):
        answer = letters[answer]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise DataError(
            f"{where}: answer is {answer!r}: it takes an index from 0 to {len(choices) - 1} or a letter from "
            f"A to {letters[-1]}."
        )
    return Question(question, tuple(choices), answer)


@torch.no_grad()
def evaluate_task(
    model: GPT,
    tokenizer: Tokenizer,
    task: ChatTask,
    group: Collectives,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    on_block: Callable[[int], None] = ignore,
) -> TaskResult:
    """Let the model answer all questions of `task`; returns how many answers are right. A collective call.

    group: the ranks, which divide the questions. The result does not depend on the number of ranks.
    sampling: how answers to questions without choices are generated.
    samples: number of answers that are generated for each question without choices. The question counts as
        answered right if one of these answers is right. With temperature 0, only one answer is generated.
    on_block: called before each block of questions (see `striping.blocks`), with the number of questions in
        all earlier blocks.
    Raises DataError if a letter of a choice is not a single token.
    """
    correct = 0
    with model.longer_context(LONGEST_CONTEXT * model.config.sequence_len):
        for block in blocks(len(task.questions), group):
            on_block(block[0])
            began, numbers = time.monotonic(), own_items(block, group)
            right = sum(_is_right(model, tokenizer, task, i, sampling, samples) for i in numbers)
            correct += add_up(group, began, right)[0]
    return task_result(task, correct, len(task.questions))


def _is_right(
    model: GPT, tokenizer: Tokenizer, task: ChatTask, number: int, sampling: Sampling, samples: int
) -> bool:
    question = task.questions[number]
    prompt = question.prompt(tokenizer)
    if question.choices:
        return likeliest_letter(model, tokenizer, prompt, question.letters) == question.answer
    samples = samples if sampling.temperature else 1
    first = (sampling.seed or 0) + number * samples
    return any(
        tokenizer.decode(list(complete(model, tokenizer, prompt, replace(sampling, seed=seed)))).strip()
        == question.answer.strip()
        for seed in range(first, first + samples)
    )


def likeliest_letter(model: GPT, tokenizer: Tokenizer, prompt: list[int], letters: str) -> str:
    """The one of `letters` with the highest logit after the prompt. prompt: token ids.

    Raises DataError if a letter is not a single token.
    """
    ids = [check_letter(tokenizer, letter) for letter in letters]
    kept = torch.tensor([prompt[-model.cos.size(0) :]], device=model.device)
    last = torch.zeros(kept.shape, dtype=torch.bool, device=model.device)
    last[0, -1] = True
    return letters[int(model.logits_at(kept, last)[0, ids].argmax())]


def check_letter(tokenizer: Tokenizer, letter: str) -> int:
    """The token id of a letter. Raises DataError if the tokenizer has no single token for it."""
    ids = tokenizer.encode(letter)
    if len(ids) != 1:
        raise DataError(
            f"The tokenizer of the checkpoint splits the letter {letter} into {len(ids)} tokens, but a task "
            "with choices needs one token for each letter. Leave tasks with it out of --chat-task."
        )
    return ids[0]


def complete(model: GPT, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling) -> Iterator[int]:
    """Yield the token ids of the assistant's answer to `prompt`.

    prompt: token ids. sampling: how tokens are drawn. The answer ends before <|assistant_end|> or BOS, or
    after sampling.max_tokens tokens.
    """
    ends = (special(tokenizer, END), tokenizer.bos_id)
    for token in generate(model, prompt, sampling):
        if token in ends:
            return
        yield token
