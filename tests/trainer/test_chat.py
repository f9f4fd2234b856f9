"""The chat in the terminal: one answer, a conversation over a pipe, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from golden_chat import byte_tokenizer
from served import write_checkpoint

from trainer.__main__ import main
from trainer.chat.answer import Answer
from trainer.chat.loaded import load

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chat"))


def test_a_prompt_is_answered_once(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--checkpoint", str(checkpoint), "--prompt", "hello", *GREEDY]) == 0
    first = capsys.readouterr()
    assert "not fine-tuned" in first.err
    assert main(["chat", "--run-dir", str(checkpoint.parents[1]), "--prompt", "hello", *GREEDY]) == 0
    assert capsys.readouterr().out == first.out


def test_a_conversation_over_a_pipe(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["hello", "and?", "/clear", "hello", "/temperature x", "/temperature 0.5", "/top-k 3", "/nothing"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", "--checkpoint", str(checkpoint), *GREEDY]) == 0
    out = capsys.readouterr().out
    assert "The conversation is empty." in out
    assert "/temperature takes a number from 0" in out
    assert "temperature is 0.5." in out
    assert "top-k is 3." in out
    assert "/nothing is no command" in out


def test_what_cannot_be_answered(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--checkpoint", str(checkpoint), "--prompt", "x" * 600, *GREEDY]) == 2
    assert "the context of this model is 512 tokens" in capsys.readouterr().err
    assert main(["chat", "--checkpoint", str(checkpoint), "--top-k", "-1", "--prompt", "x"]) == 2
    assert "top-k is -1" in capsys.readouterr().err


def test_an_answer_shows_whole_characters_and_calls() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.specials
    answer = Answer(tokenizer)
    euro = "€".encode()
    assert [answer.add([byte]) for byte in euro] == ["", "", "€"]
    answer.add([ids["<|python_start|>"], *b"1+1", ids["<|python_end|>"]])
    answer.add([ids["<|output_start|>"], *b"2", ids["<|output_end|>"], *b"!"])
    answer.end()
    assert answer.text == "€`1+1` = 2!"
    kinds = [(part["type"], part["text"]) for part in answer.parts]
    assert kinds == [("text", "€"), ("python", "1+1"), ("python_output", "2"), ("text", "!")]


def test_only_a_model_of_stage_sft_counts_as_fine_tuned(checkpoint: Path, tmp_path: Path) -> None:
    assert not load(checkpoint, "float32").fine_tuned
    assert load(write_checkpoint(tmp_path, stage="sft"), "float32").fine_tuned
