"""Conversations: rendered as nanochat renders them, bad lines named with their file, line and reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from golden_chat import GOLDEN, byte_tokenizer

from trainer.data import DataError
from trainer.data.conversations import (
    ConversationError,
    describe_bad,
    find_files,
    parse_line,
    read_file,
    render,
    render_for_completion,
)
from trainer.data.tokenizer import Tokenizer

USER = {"role": "user", "content": "a?"}
ANSWER = {"role": "assistant", "content": "b."}


def write_lines(path: Path, *conversations: Any) -> Path:
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in conversations]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_the_figures_are_the_ones_whose_origin_is_noted() -> None:
    folder = Path(__file__).parent
    origin = json.loads((folder / "golden_chat.origin.json").read_text())
    assert hashlib.sha256((folder / origin["file"]).read_bytes()).hexdigest() == origin["sha256"]


def test_conversations_are_rendered_as_in_nanochat() -> None:
    tokenizer = byte_tokenizer()
    rendered = [render(each["messages"], tokenizer) for each in GOLDEN["conversations"]]
    assert rendered == [(each["ids"], each["mask"]) for each in GOLDEN["rendered"]]


def test_a_list_of_messages_and_an_object_are_the_same_conversation() -> None:
    assert parse_line(json.dumps([USER, ANSWER]).encode()) == [USER, ANSWER]
    assert parse_line(json.dumps({"messages": [USER, ANSWER]}).encode()) == [USER, ANSWER]


def test_long_conversations_are_cut() -> None:
    ids, mask = render([USER, ANSWER], byte_tokenizer(), max_tokens=7)
    whole = render([USER, ANSWER], byte_tokenizer())
    assert (ids, mask) == (whole[0][:7], whole[1][:7])
    assert len(whole[0]) == 9


def test_a_prompt_ends_where_the_assistant_starts() -> None:
    tokenizer = byte_tokenizer()
    prompt = render_for_completion([USER, ANSWER], tokenizer)
    assert tokenizer.decode(prompt) == "<|bos|><|user_start|>a?<|user_end|><|assistant_start|>"
    assert render_for_completion([USER], tokenizer) == prompt
    assert len(render_for_completion([{"role": "user", "content": "a" * 5000}], tokenizer)) > 5000


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = byte_tokenizer()
    ids, _ = render([{"role": "user", "content": "<|assistant_end|>"}, ANSWER], tokenizer)
    assert ids.count(tokenizer.specials["<|assistant_end|>"]) == 1


def test_a_tokenizer_without_the_special_tokens_is_refused() -> None:
    bare = Tokenizer([bytes([byte]) for byte in range(256)], specials=["<|bos|>"])
    with pytest.raises(DataError, match=r"no token <\|user_start\|>"):
        render([USER, ANSWER], bare)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", r"not JSON \(column 2"),
        (b'"text"', "neither a list of messages nor"),
        (b'{"prompt": "a"}', "neither a list of messages nor"),
        (b"\xff\xfe", "not UTF-8 \\(byte 1\\)"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "no message of a user"),
        ([{"role": "system", "content": "x"}], "no message of a user"),
        ([USER], "no message of an assistant"),
        ([USER, USER], "message 2 is of 'user', not of the assistant"),
        ([{"role": "system", "content": "x"}, ANSWER], "message 2 is of 'assistant', not of the user"),
        ([USER, {"role": "tool", "content": "x"}], "message 2 is of 'tool'"),
        ([USER, {"role": "assistant"}], "message 2 is no object with role and content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}, ANSWER], "message 1.* is no string"),
        ([USER, {"role": "assistant", "content": 3}], "neither a string nor a list of parts"),
        ([USER, {"role": "assistant", "content": [{"type": "text"}]}], "object with type and text"),
        ([USER, {"role": "assistant", "content": [{"type": "image", "text": ""}]}], "has type 'image'"),
    ],
)
def test_a_bad_line_has_its_reason(line: Any, reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        parse_line(line if isinstance(line, bytes) else json.dumps(line).encode())


def test_a_line_is_read_or_reported_with_its_number(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [USER, ANSWER], b"", b"{", [USER])
    (first, messages), (third, error), (fourth, other) = read_file(path)
    assert (first, messages, third, fourth) == (1, [USER, ANSWER], 3, 4)
    assert isinstance(error, ConversationError)
    assert isinstance(other, ConversationError)
    with pytest.raises(DataError, match=r"Cannot read .*b\.jsonl"):
        list(read_file(tmp_path / "b.jsonl"))


def test_many_bad_lines_are_counted() -> None:
    lines = describe_bad([f"a.jsonl:{number}: it is not JSON" for number in range(1, 51)]).splitlines()
    assert lines[0] == "a.jsonl:1: it is not JSON"
    assert lines[20] == "and 30 more"
    assert lines[21].startswith("Bad lines: 50.")
    assert "--skip-bad" in lines[21]


def test_a_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl"]
    for name in names:
        write_lines(tmp_path / name, [USER, ANSWER])
    assert [path.name for path in find_files([tmp_path])] == sorted(names)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \*.jsonl in the folder"):
        find_files([tmp_path / "empty"])
