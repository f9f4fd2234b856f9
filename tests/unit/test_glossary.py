"""One term per concept: no page uses a word that docs/reference/glossary.md lists as one to avoid.

A source is a name and its text: pages, task names and messages in YAML, docstrings and messages in Python.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

from scripts.docs_reference import MARK

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
Source = tuple[str, str]  # name, text


def avoided_terms(page: str) -> dict[str, str]:
    """Each avoided term with the term to use: the words in code type in the third column of the table."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3:
            found.update(dict.fromkeys(re.findall(r"`([^`]+)`", cells[2]), cells[0]))
    return found


def prose(markdown: str) -> str:
    """What a page says in its own words: no code, no recorded output, no comment, no address of a link."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end -->", "", markdown, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def violations(sources: Iterable[Source], terms: dict[str, str]) -> list[str]:
    """A line for each avoided term in a source: where it stands, and the term to use."""
    found = []
    for name, text in sources:
        flat = " ".join(text.split())
        for avoided, term in terms.items():
            for hit in re.finditer(rf"(?<![\w-]){re.escape(avoided)}(?![\w-])", flat, re.IGNORECASE):
                around = flat[max(0, hit.start() - 40) : hit.end() + 20]
                found.append(f"{name}: {avoided!r} in {around!r}; use: {term}")
    return found


def pages() -> Iterator[Source]:
    """The documentation but research notes, recorded faults, generated pages and the glossary itself."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if "research" not in path.parts and path != GLOSSARY and MARK not in text:
            yield str(path.relative_to(ROOT)), prose(text)
    for path in sorted((ROOT / "roles").glob("*/README.md")):
        yield str(path.relative_to(ROOT)), prose(path.read_text(encoding="utf-8").partition(MARK)[0])


class Loader(yaml.SafeLoader):
    """Reads YAML with the tags of Ansible (`!vault`, `!unsafe`) as plain values."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))
READ = {"name", "msg", "fail_msg", "success_msg", "description", "short_description"}  # keys a person reads


def read_values(value: object) -> Iterator[str]:
    """The texts of a YAML document that a person reads: names of tasks, messages, descriptions."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in READ:
                yield from (
                    text for text in ([inner] if isinstance(inner, str) else inner) if isinstance(text, str)
                )
            else:
                yield from read_values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from read_values(inner)


def without_code(text: str) -> str:
    return re.sub(r"\{\{.*?\}\}|\{%.*?%\}|`[^`\n]*`|[BCIOV]\([^)]*\)", "", text, flags=re.DOTALL)


def yaml_texts() -> Iterator[Source]:
    """Task names, messages and descriptions of playbooks, roles and Molecule scenarios."""
    folders = ("playbooks", "roles", "molecule", "inventory", "meta")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.yml")]
    for path in sorted([*ROOT.glob("*.yml"), *paths]):
        for document in yaml.load_all(path.read_text(encoding="utf-8"), Loader):
            for text in read_values(document):
                yield str(path.relative_to(ROOT)), without_code(text)


def python_files() -> Iterator[Path]:
    for folder in ("trainer", "fleet", "plugins", "scripts", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def docstrings() -> Iterator[Source]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", without_code(text)


def python_messages() -> Iterator[Source]:
    """The strings with a space in it: messages, help, and the documentation of modules."""
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
            if isinstance(text, str) and " " in text.strip():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", without_code(text)


SOURCES = {"pages": pages, "yaml": yaml_texts, "docstrings": docstrings, "messages": python_messages}


@pytest.mark.parametrize("source", SOURCES)
def test_the_words_are_those_of_the_glossary(source: str) -> None:
    found = violations(SOURCES[source](), avoided_terms(GLOSSARY.read_text(encoding="utf-8")))
    assert not found, "\n".join(found)


def test_the_glossary_lists_terms_to_avoid() -> None:
    terms = avoided_terms(GLOSSARY.read_text(encoding="utf-8"))
    assert terms["knob"] == "setting, option"
    assert len(terms) > 40


def test_an_avoided_term_is_found_in_a_sentence_and_not_in_code() -> None:
    terms = {"knob": "setting", "go on": "resume"}
    text = "Turn the knob.\n\nRuns go\non. `knob`\n\n```\nknob\n```\n<!-- faults -->\nknob\n<!-- end -->\n"
    found = violations([("page", prose(text))], terms)
    assert [line.split(";")[1] for line in found] == [" use: setting", " use: resume"]
