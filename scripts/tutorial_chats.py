"""Make the conversations of the assistant tutorial: questions and answers from the documentation of Python.

    python -m scripts.tutorial_chats /usr/share/doc/python3.11-doc/html/_sources > chats.jsonl

The folder has the reStructuredText sources, as the Debian package python3.11-doc installs them. A question is
made from each entry of the glossary, each synopsis of a module, each documented function, method, class or
exception, and each heading that ends with a question mark, as in the FAQ. The answer is the first paragraph
that follows. See docs/assistant.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SHORTEST, LONGEST = 20, 400  # characters of an answer
MODULE = re.compile(r"^\.\. module:: (\S+)\n(?: +:platform:.*\n)? +:synopsis: (.+)$", re.M)
OBJECT = re.compile(
    r"^( *)\.\. (function|method|class|exception):: ([\w.]+).*\n(?:\1 {3}.*\n)*\n((?:\1 {3}\S.*\n)+)", re.M
)
TERM = re.compile(r"^ {3}(\S.*)\n((?: {6}\S.*\n)+)", re.M)
HEADING = re.compile(r"^(\S.*\?)\n[-=~]{4,}\n\n((?:\S.*\n)+)", re.M)
# Kind of a documented object -> the question about it.
QUESTIONS = {
    "function": "What does {name}() do?",
    "method": "What does the method {name}() do?",
    "class": "What is the class {name}?",
    "exception": "When is {name} raised?",
}


def plain(text: str) -> str:
    """The text of a paragraph without the markup of reStructuredText, on one line."""
    text = re.sub(r":[\w:+-]+:`[!~]?([^`<]*?)(?: *<[^>]*>)?`", r"\1", text)  # roles
    text = re.sub(r"`([^`<]*?)(?: *<[^>]*>)?`_+", r"\1", text)  # links
    text = re.sub(
        r"``(.+?)``|\*\*(.+?)\*\*|\*(\S.*?)\*", lambda found: next(filter(None, found.groups())), text
    )
    return " ".join(text.replace("::", ":").split())


def pairs(text: str, is_glossary: bool) -> Iterator[tuple[str, str]]:
    """Yield (question, paragraph that answers it) for each match in a page.

    text: the reStructuredText of the page. is_glossary: whether the page is the glossary, whose terms
    become questions too.
    """
    for name, synopsis in MODULE.findall(text):
        yield f"What is the module {name} for?", synopsis
    for _, kind, name, paragraph in OBJECT.findall(text):
        yield QUESTIONS[kind].format(name=name), paragraph
    yield from HEADING.findall(text)
    for term, paragraph in TERM.findall(text) if is_glossary else ():
        yield f"What is {'an' if term[:1].lower() in 'aeiou' else 'a'} {term}?", paragraph


def conversations(folder: Path) -> Iterator[list[dict[str, str]]]:
    """Yield a conversation for each question in the pages of a folder: the question and its answer.

    Each question occurs once. Answers that are very short or very long are left out.
    """
    known: set[str] = set()
    for path in sorted(folder.rglob("*.rst.txt")):
        for raw_question, paragraph in pairs(
            path.read_text(encoding="utf-8"), path.name == "glossary.rst.txt"
        ):
            question, answer = plain(raw_question), plain(paragraph)
            if SHORTEST <= len(answer) <= LONGEST and question[0] != "." and question not in known:
                known.add(question)
                yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def main(folder: str) -> None:
    found = list(conversations(Path(folder)))
    if not found:
        sys.exit(f"{folder} has no documentation of Python: install the Debian package python3.11-doc.")
    for each in found:
        print(json.dumps(each))
    print(f"{len(found):,} conversations", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m scripts.tutorial_chats FOLDER, such as .../python3.11-doc/html/_sources")
    main(sys.argv[1])
