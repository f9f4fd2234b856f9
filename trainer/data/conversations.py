"""Reads and checks files of conversations, and renders a conversation to token ids and a mask.

    ids, mask = render(parse_line(line), tokenizer, max_tokens=2048)

A file is JSONL in the format of nanochat: a line is a list of messages, or an object with such a list as
"messages". A message has a role and a content. The roles user and assistant alternate, user first; a system
message may precede them. The content is a string. The content of an assistant's message may also be a list of
parts, each with a type (text, python or python_output) and a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data import DataError
from trainer.data.tokenizer import BOS, Tokenizer

MAX_TOKENS = 2048  # of a rendered conversation, as in nanochat
PART_TYPES = ("text", "python", "python_output")
BAD_LINES_SHOWN = 20
NAMES = "*.jsonl"

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Conversation = list[Message]


class ConversationError(ValueError):
    """Raised for a conversation that cannot be rendered. The message is the reason, without file and line."""


def check(conversation: Any) -> Conversation:
    """Check a conversation; returns its messages, a list of dicts with role and content.

    conversation: the parsed JSON of a line: a list of messages, or {"messages": list of messages}. Raises
    ConversationError if the format of a message or the order of the roles is invalid.
    """
    messages = conversation.get("messages") if isinstance(conversation, dict) else conversation
    if not isinstance(messages, list):
        raise ConversationError("it is neither a list of messages nor an object with such a list as messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ConversationError(f"message {number} is no object with role and content")
        _check_content(number, message["role"], message["content"])
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    offset = 1 + len(messages) - len(turns)
    for index, message in enumerate(turns):
        due = ("user", "assistant")[index % 2]
        if message["role"] != due:
            raise ConversationError(f"message {index + offset} is of {message['role']!r}, not of the {due}")
    if not turns:
        raise ConversationError("it has no message of a user")
    return messages


def _check_content(number: int, role: Any, content: Any) -> None:
    if isinstance(content, str):
        return
    if role != "assistant":
        raise ConversationError(f"the content of message {number}, of {role!r}, is no string")
    if not isinstance(content, list):
        raise ConversationError(f"the content of message {number} is neither a string nor a list of parts")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ConversationError(f"a part of message {number} is no object with type and text")
        if part.get("type") not in PART_TYPES:
            raise ConversationError(
                f"a part of message {number} has type {part.get('type')!r}; it takes {', '.join(PART_TYPES)}"
            )


def parse_line(line: bytes) -> Conversation:
    """Parse and check one line of a file; returns the messages of its conversation.

    Raises ConversationError if the line is not a valid conversation, or has no message of an assistant.
    """
    try:
        conversation = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConversationError(f"it is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ConversationError(f"it is not JSON (column {error.colno}: {error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"it cannot be read as JSON ({error})") from None
    messages = check(conversation)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConversationError("it has no message of an assistant, so there is nothing to train on")
    return messages


def find_files(sources: Sequence[Path]) -> list[Path]:
    """The files of `sources`: each file itself, and the *.jsonl files in each folder, sorted by name.

    Raises DataError if a folder has no *.jsonl file.
    """
    files: list[Path] = []
    for source in sources:
        found = sorted(source.glob(NAMES)) if source.is_dir() else [source]
        if not found:
            raise DataError(f"There is no {NAMES} in the folder {source}.")
        files += found
    return files


def read_file(path: Path) -> Iterator[tuple[int, Conversation | ConversationError]]:
    """Yield (line number, messages) for each line, or (line number, error) for a bad line.

    Line numbers start at 1. Blank lines are skipped. Raises DataError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, parse_line(line)
                    except ConversationError as error:
                        yield number, error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def describe_bad(bad: Sequence[str]) -> str:
    """The message about bad lines: the first BAD_LINES_SHOWN of them, the number of all, and the remedy.

    bad: a text FILE:LINE: REASON for each bad line.
    """
    lines = [*bad[:BAD_LINES_SHOWN]]
    if more := len(bad) - len(lines):
        lines.append(f"and {more} more")
    lines.append(
        f"Bad lines: {len(bad)}. A line is a list of messages, user and assistant in turn. Correct them, or "
        "leave them out with --skip-bad."
    )
    return "\n".join(lines)


def render(
    messages: Conversation, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS
) -> tuple[list[int], list[int]]:
    """Render a conversation; returns (token ids, mask), two lists of equal length.

    The mask is 1 for the tokens that the model is trained to predict: the assistant's text, its calls of
    Python and <|assistant_end|>, but not the output of Python. Both lists are cut after `max_tokens`. Raises
    ConversationError if `messages` are not a valid conversation, DataError if the tokenizer lacks a special
    token.
    """
    ids, mask = [special(tokenizer, BOS)], [0]

    def add(tokens: Sequence[int], trained: int) -> None:
        ids.extend(tokens)
        mask.extend([trained] * len(tokens))

    for message in _merge_system(check(messages)):
        role, content = message["role"], message["content"]
        trained = int(role == "assistant")
        add([special(tokenizer, f"<|{role}_start|>")], 0)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            _add_part(add, part, tokenizer, trained)
        add([special(tokenizer, f"<|{role}_end|>")], trained)
    return ids[:max_tokens], mask[:max_tokens]


def _add_part(
    add: Callable[[Sequence[int], int], None], part: Mapping[str, str], tokenizer: Tokenizer, trained: int
) -> None:
    tokens = tokenizer.encode(part["text"])
    if part["type"] == "text":
        add(tokens, trained)
        return
    name, trained = ("python", trained) if part["type"] == "python" else ("output", 0)
    add([special(tokenizer, f"<|{name}_start|>"), *tokens, special(tokenizer, f"<|{name}_end|>")], trained)


def render_for_completion(messages: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt that a model completes with the next message of the assistant.

    If the last message is the assistant's, it is left out. The ids end with <|assistant_start|>. Raises
    ConversationError if `messages` are not a valid conversation, DataError if the tokenizer lacks a special
    token.
    """
    messages = check(messages)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    ids, _ = render(messages, tokenizer, max_tokens=2**62)
    return [*ids, special(tokenizer, "<|assistant_start|>")]


def _merge_system(messages: Conversation) -> Conversation:
    """The messages without a leading system message, which becomes the start of the first user message."""
    if messages[0]["role"] != "system":
        return messages
    first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]


def special(tokenizer: Tokenizer, name: str) -> int:
    """The id of the special token `name`. Raises DataError if the tokenizer has none of this name."""
    try:
        return tokenizer.specials[name]
    except KeyError:
        raise DataError(
            f"The tokenizer has no token {name}, which conversations need. Use one made by "
            "python -m trainer prepare, or that of nanochat."
        ) from None
