"""The exchange at the end of the demo: conversations to fine-tune a model on, and questions to this model.

The conversations are made of the demo's text. Each asks how a sentence continues. A small model learns the
form of an answer from some hundreds of conversations, and little more.
"""

import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from fleet import FleetError
from trainer.data.corpus import SHARDS, read_manifest
from trainer.data.sources import shard_texts

CONVERSATIONS = 1000
"""The most conversations that are made. One epoch of fine-tuning on them takes about a minute."""
HELD_OUT = 2
"""The number of conversations that are not used for fine-tuning; their questions are asked at the end."""
ASKED = "How does this sentence continue? "
ANSWER_TOKENS = 40
ANSWER_SECONDS = 60.0
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?:^|(?<=[.!?] ))([A-Z][a-z]*(?: [\w'-]+,?){7,30}\.)(?= |$)")
_FIRST_WORDS = 5
_OF_DOCUMENT = 4
_PAGE = re.compile(r"Page: (http://\S+)/\s")


def sentences(texts: Iterator[str]) -> Iterator[str]:
    """Yield plain sentences of 8 to 31 words, at most _OF_DOCUMENT from each text, and no sentence twice."""
    seen: set[str] = set()
    for text in texts:
        paragraphs = (" ".join(each.split()) for each in _PARAGRAPH.split(text))
        found = (
            each for paragraph in paragraphs for each in _SENTENCE.findall(paragraph) if each not in seen
        )
        for sentence in itertools.islice(found, _OF_DOCUMENT):
            seen.add(sentence)
            yield sentence


def conversation(sentence: str) -> list[dict[str, str]]:
    """A conversation of two messages, dicts with role and content, made of a sentence.

    The first words of the sentence are in the user's question; the others are the assistant's answer.
    """
    words = sentence.split(" ")
    start, rest = " ".join(words[:_FIRST_WORDS]), " ".join(words[_FIRST_WORDS:])
    question = f"{ASKED}{start} ..."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": rest}]


def make_conversations(data: Path, out: Path) -> list[str]:
    """Write conversations of the documents in the data directory `data` to the JSONL file `out`.

    Returns HELD_OUT questions of conversations that were not written. Raises FleetError if the text has too
    few sentences.
    """
    train = [
        data / SHARDS / each["name"] for each in read_manifest(data)["shards"] if each["split"] == "train"
    ]
    texts = (text for path in train for batch in shard_texts(path) for text in batch)
    made = [
        conversation(sentence)
        for sentence, _ in zip(sentences(texts), range(CONVERSATIONS + HELD_OUT), strict=False)
    ]
    if len(made) < 10 * HELD_OUT:
        raise FleetError(
            f"The text has {len(made)} plain sentences, too few to make conversations of. Give more text, or "
            "leave the exchange out: make demo ARGS=--no-chat"
        )
    plain = [each for each in made if f"{ASKED}The " in each[0]["content"]]
    held_out = (plain + made)[:HELD_OUT]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(each) + "\n" for each in made if each not in held_out)
    out.write_text("".join(lines), encoding="utf-8")
    return [each[0]["content"] for each in held_out]


def served_at(notes: list[str]) -> str:
    """The URL of the model server, from `notes`, the messages of serve.yml.

    Raises FleetError if no message has the URL.
    """
    found = _PAGE.search("\n".join(notes) + "\n")
    if not found:
        raise FleetError("serve.yml did not report the address of the model.")
    return found[1]


def ask(url: str, question: str) -> str:
    """The answer of the model at `url` to a question, on one line.

    Raises FleetError if the server does not answer, or if its answer is invalid.
    """
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": ANSWER_TOKENS, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"temperature": 0.6}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        # Without a proxy: the addresses of a lab exist on this machine only.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_SECONDS) as reply:
            content = json.load(reply)["choices"][0]["message"]["content"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise FleetError(f"The model at {url} did not answer: {error}.") from None
    return " ".join(str(content).split()) or "(nothing)"
