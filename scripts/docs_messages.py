"""The messages of the checks, read from the sources, for docs/reference/messages.md.

A message is written in Python as a call of finding(), warning() or doctor_finding(), and in YAML as a text
that begins with its code, such as `NF601: The data differ. Fix: ansible-playbook setup.yml`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.generated import ROOT

FINDING_MAKERS = ("finding", "warning", "doctor_finding")
IN_YAML = re.compile(r"(NF\d{3}): (.*?)(?:\s+Fix: (.*))?", re.DOTALL)
# What stands for an expression: its first text, else the first name in it, else "...".
TEXT_IN_YAML = re.compile(r"\{\{ *[(\[]*'([^']*)'.*?\}\}", re.DOTALL)
NAME_IN_YAML = re.compile(r"\{\{ *[(\[]*_*([\w.]+).*?\}\}", re.DOTALL)
ARITHMETIC = re.compile(r" (?:[*/+-]|//) ")
OTHER_IN_YAML = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


class Message(NamedTuple):
    """A message that a check can report. Values that are known only at run time are in angle brackets."""

    code: str
    problem: str
    remedy: str
    severity: str


def placeholder(node: ast.AST) -> str:
    """The text that stands for a value known only at run time: <NAME>, or "..." if it has no name."""
    if isinstance(node, ast.Name):
        return f"<{node.id}>"
    if isinstance(node, ast.Attribute):
        return f"<{node.attr}>"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"<{node.slice.value!s}>"
    return "..."


def text_of(node: ast.AST, names: Mapping[str, list[str]]) -> list[str]:
    """All texts that an expression can evaluate to; [] if it is not a text. names: texts of variables."""

    def one(part: ast.AST) -> str:
        return (text_of(part, names) or [placeholder(part)])[0]

    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.FormattedValue):
        return [one(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(one(part) for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + one(node.right) for left in text_of(node.left, names) or [placeholder(node.left)]]
    if isinstance(node, ast.IfExp):
        return text_of(node.body, names) + text_of(node.orelse, names)
    return names.get(node.id, []) if isinstance(node, ast.Name) else []


def assigned(node: ast.Assign) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, texts) of each name that a statement assigns; texts is [] if the value is not a text."""
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    return ((name.id, text_of(value, {})) for name, value in pairs if isinstance(name, ast.Name))


def default_severity(tree: ast.Module) -> str:
    """The severity of the findings of a module whose calls do not name one."""
    source = ast.unparse(tree)
    partial = re.search(r"^finding = partial\(doctor_finding, severity='(\w+)'\)", source, re.MULTILINE)
    return partial[1] if partial else "error" if "doctor_finding" in source else "refusal"


def messages_in(path: Path) -> Iterator[Message]:
    """Yield each message that a Python file can report."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = dict(each for node in tree.body if isinstance(node, ast.Assign) for each in assigned(node))
    severity = default_severity(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names, reported = dict(constants), set(constants)
        for node in sorted(ast.walk(function), key=lambda each: getattr(each, "lineno", 0)):
            if isinstance(node, ast.Assign):
                # A name may be assigned once for each finding: the values since the last finding count.
                for name, texts in assigned(node):
                    names[name] = texts if name in reported else names.get(name, []) + texts
                    reported.discard(name)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in FINDING_MAKERS or function.name in FINDING_MAKERS:
                continue
            reported = set(names)
            code, _host, problem, remedy = node.args[:4]
            others = [*node.args[4:], *(word.value for word in node.keywords)]
            warns = node.func.id == "warning" or ["warning"] in [text_of(each, {}) for each in others]
            fix = (text_of(remedy, names) or [placeholder(remedy)])[0]
            for number in text_of(code, names):
                for text in text_of(problem, names) or [placeholder(problem)]:
                    yield Message(number, text, fix, "warning" if warns else severity)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a YAML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)


def without_expressions(text: str) -> str:
    """A text of Jinja with what stands for each of its expressions, and without its statements."""
    named = NAME_IN_YAML.sub(
        lambda found: "..." if ARITHMETIC.search(found[0]) else f"<{found[1]}>", TEXT_IN_YAML.sub(r"\1", text)
    )
    return OTHER_IN_YAML.sub(lambda found: "" if found[0].startswith("{%") else "...", named)


def messages_in_yaml(path: Path) -> Iterator[Message]:
    """Yield each message of a file of tasks or plays."""
    for text in texts_in(yaml.safe_load(path.read_text(encoding="utf-8"))):
        # An expression may contain "Fix: ", so it is replaced before the text is split.
        if found := IN_YAML.fullmatch(without_expressions(text.strip())):
            code, problem, fix = found.groups(default="")
            yield Message(code, problem, fix, "error")


def messages() -> list[Message]:
    """Each message of plugins/, roles/ and playbooks/, sorted by code."""
    found = {each for path in ROOT.glob("plugins/**/*.py") for each in messages_in(path)}
    for path in [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml")]:
        found.update(messages_in_yaml(path))
    return sorted(found)
