"""Write the reference pages of the documentation and of the roles' READMEs from the sources.

    python -m scripts.docs_reference            # write docs/reference/*.md and roles/*/README.md
    python -m scripts.docs_reference --check    # write nothing, name the pages that are not current

Settings come from RunConfig, the argument specs of the roles and the list of settings that -e accepts;
commands from the argument parsers; messages from the calls in the sources that make findings. In a README
only the part between its two markers is written; a README without them gets a section at its end. The pages
do not depend on the machine.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.generated import ROOT, write

PAGES = ROOT / "docs" / "reference"
MARK = "<!-- Written by scripts/docs_reference.py. Edit the sources, then run it again. -->"
BEGIN, END = "<!-- From meta/argument_specs.yml by scripts/docs_reference.py: -->", "<!-- end -->"
SECTIONS = {
    "identity": "Define the result of the run. They are fixed once the run has begun.",
    "horizon": "Define the length of the run. They may become longer on resume.",
    "runtime": "May change at every start of the run.",
}
GROUPS = {
    "fleet": "Fleet and hosts",
    "nanofleet": "Fleet and hosts",
    "runtime": "Installation",
    "wheelhouse": "Installation",
    "tracker": "Tracker",
    "network": "Network",
    "launch": "Run units",
    "preflight": "Host requirements",
    "doctor": "Doctor",
    "bench": "Benchmark",
    "lab": "Lab",
    "reset": "Reset",
}
TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
FINDING_MAKERS = ("finding", "warning", "doctor_finding")
Options = Mapping[str, Mapping[str, Any]]
Specs = Mapping[str, Mapping[str, Any]]
MESSAGE_AREAS = {
    "NF0": "Settings and inventory",
    "NF1": "Hosts",
    "NF2": "Network",
    "NF3": "Installed environments",
    "NF4": "Runs",
    "NF5": "Doctor",
}


# -- Markdown ----------------------------------------------------------------------------------------------


def cell(text: Any) -> str:
    """`text` for one cell of a Markdown table: on one line, escaped; C(x), V(x) and O(x) become code."""
    flat = " ".join(str(text).split())
    flat = re.sub(r"\b[CVO]\(([^)]*)\)", r"`\1`", flat)
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def page(title: str, introduction: str, body: Iterable[str]) -> str:
    """The text of a page of the reference, with the mark of a generated file."""
    return "\n".join([f"# {title}", "", MARK, "", introduction, "", *body]).rstrip() + "\n"


def code(value: Any) -> str:
    """A default as YAML in Markdown code; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else '`""`'


# -- settings ----------------------------------------------------------------------------------------------


def yaml_values(key: str) -> Any:
    """The value of the top-level `key` in the first YAML file of playbooks/ or roles/*/vars that has it."""
    for path in sorted([*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/vars/*.yml")]):
        if f"\n{key}:" in path.read_text(encoding="utf-8"):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(values, Mapping) and key in values:
                return values[key]
    raise SystemExit(f"No YAML file of playbooks/ or roles/*/vars defines {key}.")


def role_specs() -> Iterator[tuple[Path, Specs]]:
    """Yield (folder of a role, its argument specs by entry point) for each role."""
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        yield path.parents[1], yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]


def options_in(specs: Specs) -> Options:
    """The options of all entry points of a role: name -> its spec."""
    return {name: option for spec in specs.values() for name, option in (spec.get("options") or {}).items()}


def sentences(description: str | list[str]) -> str:
    """`description` as one text; in YAML it may be a list of texts."""
    return description if isinstance(description, str) else " ".join(description)


def described(spec: Mapping[str, Any]) -> str:
    """The description of an option with its choices and range, for a cell of a table."""
    text = sentences(spec.get("description", ""))
    if spec.get("choices"):
        text += " Choices: " + ", ".join(f"`{choice}`" for choice in spec["choices"]) + "."
    if "min" in spec or "max" in spec:
        text += f" Range: {spec.get('min', '')} to {spec.get('max', '')}."
    return cell(text)


def option_table(noun: str, options: Options, required: str = "") -> list[str]:
    """The lines of a table of options; [] without options. required: the default shown for required ones."""
    rows = [
        (
            f"`{name}`",
            cell(option.get("type", "str")),
            required if option.get("required") else code(option.get("default")),
            described(option),
        )
        for name, option in options.items()
    ]
    return [*table((noun, "type", "default", "meaning"), rows), ""] if rows else []


def settings_page() -> str:
    """The text of docs/reference/settings.md."""
    from trainer.config import RunConfig

    lines = ["## Settings of a run", ""]
    for section, meaning in SECTIONS.items():
        fields = [each for each in dataclasses.fields(RunConfig) if each.metadata.get("section") == section]
        rows = [
            (f"`{each.name}`", str(each.type), code(each.default), cell(each.metadata["help"]))
            for each in fields
        ]
        lines += [f"### {section.capitalize()}", "", meaning, ""]
        lines += [*table(("setting", "type", "default", "meaning"), rows), ""]
    known = yaml_values("preflight_declared_settings")
    named = {name: spec | {"type": TYPES.get(spec["type"], spec["type"])} for name, spec in known.items()}
    lines += ["## Settings of commands and hosts", "", *option_table("setting", named)]
    options = {name: option for _, specs in role_specs() for name, option in options_in(specs).items()}
    names = [name for name in yaml_values("preflight_settings") if name in options and name not in known]
    for title in dict.fromkeys(GROUPS.values()):
        group = {name: options[name] for name in names if GROUPS.get(name.partition("_")[0]) == title}
        if group:
            lines += [f"## {title}", "", *option_table("setting", group)]
    return page(
        "Settings",
        "Set a setting for one command with `-e NAME=VALUE`, or for good in the inventory "
        "(`group_vars/fleet.yml`, or beside a host). `train.yml` refuses an unknown name and suggests "
        "the nearest known one. `steps` is the short name of `num_iterations`.",
        lines,
    )


def roles_page() -> str:
    """The text of docs/reference/roles.md."""
    lines: list[str] = []
    for role, specs in role_specs():
        entries = ((f"`{name}`", cell(spec.get("short_description", ""))) for name, spec in specs.items())
        lines += [f"## {role.name}", "", *table(("entry point", "what it does"), entries), ""]
        lines += option_table("variable", options_in(specs))
    return page(
        "Roles",
        "Each role gives a host one capability. The playbooks set these variables from the "
        "[settings](settings.md); set them yourself where you use a role in a playbook of your own.",
        lines,
    )


def readme(role: Path, specs: Specs) -> str:
    """The text of a role's README with its generated section from `specs`."""
    before, _, rest = (role / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    body = "\n".join([BEGIN, "", *readme_tables(specs, "| entry point |" not in before), END])
    if not rest:
        return f"{before.rstrip()}\n\n## Variables\n\n{body}\n"
    return before + body + rest.partition(END)[2]


def readme_tables(specs: Specs, with_entries: bool) -> Iterator[str]:
    """Yield the lines of a README's tables: entry points, if `with_entries`, and options.

    An option is listed once, with its entry points unless all of them take it.
    """
    if with_entries:
        entries = ((f"`{name}`", cell(spec["short_description"])) for name, spec in specs.items())
        yield from [*table(("entry point", "what it does"), entries), ""]
    rows = []
    for name in options_in(specs):
        takers = {
            entry: spec["options"][name] for entry, spec in specs.items() if name in spec.get("options", {})
        }
        option = next(iter(takers.values()))
        only = "" if len(takers) == len(specs) else f" ({', '.join(f'`{entry}`' for entry in takers)})"
        kind = f"{option['type']} of {option['elements']}" if option.get("elements") else option["type"]
        kind += f": {', '.join(map(str, option['choices']))}" if option.get("choices") else ""
        default = "required" if option.get("required") else code(option.get("default")) or '`""`'
        rows.append((f"`{name}`", kind, cell(default), cell(sentences(option["description"])) + only))
    if rows:
        yield from [*table(("variable", "type", "default", "meaning"), rows), ""]


def modules_page() -> str:
    """The text of docs/reference/modules.md, from the DOCUMENTATION of each module."""
    lines: list[str] = []
    for path in sorted(ROOT.glob("plugins/modules/*.py")):
        found = re.search(r'^DOCUMENTATION = r?"""\n(.*?)^"""', path.read_text(encoding="utf-8"), re.M | re.S)
        if found is None:
            continue
        about = yaml.safe_load(found[1])
        texts = about.get("description") or []
        texts = [texts] if isinstance(texts, str) else texts
        lines += [f"## {about['module']}", "", f"{cell(about['short_description'])}.", ""]
        lines += [*(f"- {cell(text)}" for text in texts), ""]
        lines += option_table("option", about.get("options") or {}, required="required")
    return page(
        "Modules",
        "The Ansible modules of the project: what has state on a host and no existing module covers.",
        lines,
    )


# -- commands ----------------------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield (name with its value, meaning) of each option of a command, for a table."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = ", ".join(action.option_strings) or str(action.dest)
        if action.nargs != 0:
            value = action.metavar or (
                "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
            )
            name += f" {value or action.dest.upper()}" if action.option_strings else ""
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"`{name}`", cell(text) + (" Required." if action.required and action.option_strings else "")


def command_lines(program: str, parser: argparse.ArgumentParser) -> list[str]:
    """The lines of the section about a program with subcommands."""
    lines = [f"## {program}", "", cell(parser.description or ""), ""]
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        lines += [f"### {program} {name}", "", cell(helps.get(name) or command.description or ""), ""]
        lines += [*table(("option", "meaning"), options_of(command)), ""]
    return lines


def cli_page() -> str:
    """The text of docs/reference/cli.md."""
    trainer = importlib.import_module("trainer.__main__").make_parser()
    console = importlib.import_module("fleet.__main__").parser()
    targets = re.findall(
        r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    make = table(("target", "what it does"), ((f"`make {name}`", cell(text)) for name, text in targets))
    return page(
        "Commands",
        "`python -m trainer` trains and needs no fleet. `python -m fleet` runs the playbooks with a live "
        "display. `make` builds, tests and measures in a checkout.",
        [
            *command_lines("python -m trainer", trainer),
            *command_lines("python -m fleet", console),
            "## make",
            "",
            *make,
        ],
    )


def playbooks_page() -> str:
    """The text of docs/reference/playbooks.md: each root playbook with its plays in their order."""
    lines: list[str] = []
    for path in sorted(ROOT.glob("*.yml")):
        plays = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(plays, list) or "ansible.builtin.import_playbook" not in plays[0]:
            continue
        comments = [
            line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
        ]
        lines += [f"## {path.name}", "", f"{cell(plays[0]['name'])}. {cell(' '.join(comments))}".strip(), ""]
        inner = ROOT / plays[0]["ansible.builtin.import_playbook"]
        for number, play in enumerate(yaml.safe_load(inner.read_text(encoding="utf-8")), 1):
            hosts = "" if "hosts" not in play else f" (`{play['hosts']}`)"
            lines.append(f"{number}. {cell(play.get('name', ''))}{hosts}")
        lines.append("")
    return page(
        "Playbooks",
        "Each command is a playbook in the root of the repository. The list shows its plays in their order, "
        "and the hosts of a play where it names them. Every playbook may be run again.",
        lines,
    )


def exit_codes_page() -> str:
    """The text of docs/reference/exit-codes.md."""
    found: dict[str, Any] = {}
    for path in sorted(ROOT.glob("trainer/**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id in ("EXIT_CODES", "BAD_INPUT_EXIT_CODE"):
                found[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    meaning = {
        "finished": "Every step is done.",
        "stopped": "A person asked for the end, with `stop.yml` or a file named `stop`.",
        "retryable": "A restart can help, as after the loss of a peer. The unit restarts.",
        "final": "A restart cannot help, as after a loss that is not a number. The unit does not restart.",
    }
    rows = [(f"`{value}`", name, meaning[name]) for name, value in found["EXIT_CODES"].items()]
    rows.append(
        (f"`{found['BAD_INPUT_EXIT_CODE']}`", "bad input", "A setting, a file or the data cannot be used.")
    )
    rows.append(("`130`", "interrupted", "Ctrl-C. Nothing was saved since the last checkpoint."))
    console = (importlib.import_module("fleet.__main__").parser().epilog or "").removeprefix("exit codes: ")
    return page(
        "Exit codes",
        "`outcome.json` in the run directory has the outcome and a sentence with its reason.",
        [
            "## python -m trainer train",
            "",
            *table(("exit code", "outcome", "meaning"), rows),
            "",
            "## python -m fleet",
            "",
            *(f"- {cell(part)}" for part in console.split(";")),
        ],
    )


# -- messages ----------------------------------------------------------------------------------------------


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
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        values = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        return ["".join((text_of(value, names) or [placeholder(value)])[0] for value in values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left = text_of(node.left, names) or [placeholder(node.left)]
        right = text_of(node.right, names) or [placeholder(node.right)]
        return [a + b for a in left for b in right]
    if isinstance(node, ast.IfExp):
        return text_of(node.body, names) + text_of(node.orelse, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, [])
    return []


def assignments(body: Iterable[ast.AST]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line, name, texts) of each assignment to a name; texts is [] if the value is not a text."""
    for node in body:
        if not isinstance(node, ast.For | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.For) else node.targets[0]
        value = node.iter if isinstance(node, ast.For) else node.value
        pairs = [(target, value)]
        if isinstance(node, ast.Assign) and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for target, value in pairs:
            texts = text_of(value, {})
            for name in (each for each in ast.walk(target) if isinstance(each, ast.Name)):
                yield node.lineno, name.id, texts if name is target else []


def default_severity(tree: ast.Module) -> str:
    """The severity of the findings of a module whose calls do not name one."""
    for node in tree.body:
        # finding = partial(doctor_finding, severity="warning")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for word in node.value.keywords:
                if word.arg == "severity" and isinstance(word.value, ast.Constant):
                    return str(word.value.value)
    imported = [each.name for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names]
    return "error" if "doctor_finding" in imported else "refusal"


def messages_in(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (code, problem, remedy, severity) of each finding that a Python file can make."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {name: texts for _, name, texts in assignments(tree.body)}
    severity = default_severity(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        made = sorted(assignments(ast.walk(function)))
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        before = 0
        for call in sorted(calls, key=lambda each: each.lineno):
            maker = getattr(call.func, "id", "")
            if maker not in FINDING_MAKERS or function.name in FINDING_MAKERS:
                continue
            # A name may be assigned once for each finding: the values since the last finding count.
            names = constants | {name: texts for line, name, texts in made if line <= call.lineno}
            since = [(name, texts) for line, name, texts in made if before < line <= call.lineno]
            for name in {name for name, _ in since}:
                names[name] = [text for each, texts in since if each == name for text in texts]
            before = call.lineno
            code, _host, problem, remedy = call.args[:4]
            others = [*call.args[4:], *(word.value for word in call.keywords)]
            warns = maker == "warning" or ["warning"] in [text_of(each, {}) for each in others]
            typed = (text_of(remedy, names) or [placeholder(remedy)])[0]
            for number in text_of(code, names):
                for text in text_of(problem, names) or [placeholder(problem)]:
                    yield number, text, typed, "warning" if warns else severity


def messages() -> list[tuple[str, str, str, str]]:
    """(Code, problem, remedy, severity) of each finding of plugins/, sorted by code."""
    return sorted({each for path in ROOT.glob("plugins/**/*.py") for each in messages_in(path)})


def messages_page() -> str:
    """The text of docs/reference/messages.md."""
    rows, lines = messages(), list[str]()
    for area, title in MESSAGE_AREAS.items():
        shown = (map(cell, row) for row in rows if row[0].startswith(area))
        lines += [f"## {title}", "", *table(("code", "message", "what to type", "severity"), shown), ""]
    return page(
        "Messages",
        "The findings of the checks before and during `setup.yml` and `train.yml`, and of `doctor.yml`. A "
        "code keeps its meaning in later releases. A part in angle brackets is filled in at run time. A "
        "refusal stops the command before a host is changed. An error of `doctor.yml` prevents training. A "
        "warning stops nothing.",
        lines,
    )


def pages() -> dict[Path, str]:
    """The path and text of every generated page and README."""
    made = {
        "settings.md": settings_page,
        "cli.md": cli_page,
        "playbooks.md": playbooks_page,
        "roles.md": roles_page,
        "modules.md": modules_page,
        "exit-codes.md": exit_codes_page,
        "messages.md": messages_page,
    }
    readmes = {role / "README.md": readme(role, specs) for role, specs in role_specs()}
    return {PAGES / name: make() for name, make in made.items()} | readmes


if __name__ == "__main__":
    sys.exit(write("docs_reference", __doc__ or "", pages()))
