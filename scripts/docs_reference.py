"""Write the reference pages of the documentation from the sources.

    python -m scripts.docs_reference            # write docs/reference/*.md
    python -m scripts.docs_reference --check    # write nothing, name the pages that are not current

Settings come from RunConfig, the argument specs of the roles and the list of settings that -e accepts;
commands from the argument parsers; messages from the calls in the sources that make findings. The pages do
not depend on the machine.
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

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
MARK = "<!-- Written by scripts/docs_reference.py. Edit the sources, then run it again. -->"
SECTIONS = {
    "identity": "Define the result of the run. They are fixed once the run has begun.",
    "horizon": "Define the length of the run. They may become longer on resume.",
    "runtime": "May change at every start of the run.",
}
GROUPS = {
    "fleet": "Fleet and hosts",
    "nanofleet": "Fleet and hosts",
    "runtime": "Installation",
    "tracker": "Tracker",
    "network": "Network",
    "launch": "Run units",
    "preflight": "Host requirements",
    "doctor": "Doctor",
    "bench": "Benchmark",
    "lab": "Lab",
    "reset": "Reset",
}
NUMBERS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
MESSAGE_MAKERS = ("finding", "warning", "Finding", "doctor_finding")
MESSAGE_SOURCES = {
    "settings_check": "Settings",
    "preflight": "Preflight",
    "network": "Network",
    "doctor": "Doctor",
}


# -- Markdown ----------------------------------------------------------------------------------------------


def cell(text: Any) -> str:
    """Text for one cell of a table. Ansible's C(x) becomes code."""
    flat = " ".join(str(text).split())
    flat = re.sub(r"\b[CVO]\(([^)]*)\)", r"`\1`", flat)
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def page(title: str, introduction: str, body: Iterable[str]) -> str:
    """A page of the reference."""
    return "\n".join([f"# {title}", "", MARK, "", introduction, "", *body]).rstrip() + "\n"


def code(value: Any) -> str:
    """A default as it is written in YAML."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else '`""`'


# -- settings ----------------------------------------------------------------------------------------------


def yaml_values(key: str) -> Any:
    """The value of a top-level key in the YAML files of playbooks and roles."""
    for path in sorted([*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/vars/*.yml")]):
        if f"\n{key}:" in path.read_text(encoding="utf-8"):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(values, Mapping) and key in values:
                return values[key]
    raise SystemExit(f"No YAML file of playbooks/ or roles/*/vars defines {key}.")


def role_options() -> dict[str, Mapping[str, Any]]:
    """Every option of every role by its name."""
    options: dict[str, Mapping[str, Any]] = {}
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        for spec in yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"].values():
            options |= spec.get("options") or {}
    return options


def described(spec: Mapping[str, Any]) -> str:
    """An option's description and limits."""
    text = spec.get("description", "")
    text = text if isinstance(text, str) else " ".join(text)
    if spec.get("choices"):
        text += " Choices: " + ", ".join(f"`{choice}`" for choice in spec["choices"]) + "."
    if "min" in spec or "max" in spec:
        text += f" Range: {spec.get('min', '')} to {spec.get('max', '')}."
    return cell(text)


def settings_page() -> str:
    """docs/reference/settings.md."""
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
    known, options = yaml_values("preflight_known_knobs"), role_options()
    rows = [
        (
            f"`{name}`",
            str(NUMBERS.get(spec["type"], spec["type"])),
            code(spec.get("default")),
            described(spec),
        )
        for name, spec in known.items()
    ]
    lines += ["## Settings of commands and hosts", ""]
    lines += [*table(("setting", "type", "default", "meaning"), rows), ""]
    names = [name for name in yaml_values("preflight_settings") if name in options and name not in known]
    for title in dict.fromkeys(GROUPS.values()):
        of_group = [name for name in names if GROUPS.get(name.partition("_")[0]) == title]
        rows = [
            (
                f"`{name}`",
                cell(options[name].get("type", "str")),
                code(options[name].get("default")),
                described(options[name]),
            )
            for name in of_group
        ]
        if rows:
            lines += [f"## {title}", "", *table(("setting", "type", "default", "meaning"), rows), ""]
    return page(
        "Settings",
        "Set a setting for one command with `-e NAME=VALUE`, or for good in the inventory "
        "(`group_vars/fleet.yml`, or beside a host). `train.yml` refuses an unknown name and suggests "
        "the nearest known one. `steps` is the short name of `num_iterations`.",
        lines,
    )


def roles_page() -> str:
    """docs/reference/roles.md."""
    lines: list[str] = []
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        lines += [f"## {path.parents[1].name}", ""]
        entries = ((f"`{name}`", cell(spec.get("short_description", ""))) for name, spec in specs.items())
        lines += [*table(("entry point", "what it does"), entries), ""]
        options: dict[str, Mapping[str, Any]] = {}
        for spec in specs.values():
            options |= spec.get("options") or {}
        rows = [
            (f"`{name}`", cell(option.get("type", "str")), code(option.get("default")), described(option))
            for name, option in options.items()
        ]
        if rows:
            lines += [*table(("variable", "type", "default", "meaning"), rows), ""]
    return page(
        "Roles",
        "Each role gives a host one capability. The playbooks set these variables from the "
        "[settings](settings.md); set them yourself where you use a role in a playbook of your own.",
        lines,
    )


def modules_page() -> str:
    """docs/reference/modules.md: the documentation that each module carries."""
    lines: list[str] = []
    files = [*ROOT.glob("roles/*/library/*.py"), *ROOT.glob("plugins/modules/*.py")]
    for path in sorted(files, key=lambda each: each.name):
        found = re.search(r'^DOCUMENTATION = r?"""\n(.*?)^"""', path.read_text(encoding="utf-8"), re.M | re.S)
        if found is None:
            continue
        about = yaml.safe_load(found[1])
        texts = about.get("description") or []
        texts = [texts] if isinstance(texts, str) else texts
        lines += [f"## {about['module']}", "", f"{cell(about['short_description'])}.", ""]
        lines += [*(f"- {cell(text)}" for text in texts), ""]
        rows = [
            (
                f"`{name}`",
                cell(option.get("type", "str")),
                "required" if option.get("required") else code(option.get("default")),
                described(option),
            )
            for name, option in (about.get("options") or {}).items()
        ]
        if rows:
            lines += [*table(("option", "type", "default", "meaning"), rows), ""]
    return page(
        "Modules",
        "The Ansible modules of the project: what has state on a host and no existing module covers.",
        lines,
    )


# -- commands ----------------------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Name and meaning of each option of a command."""
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
    """The section of a program with subcommands."""
    lines = [f"## {program}", "", cell(parser.description or ""), ""]
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        lines += [f"### {program} {name}", "", cell(helps.get(name) or command.description or ""), ""]
        lines += [*table(("option", "meaning"), options_of(command)), ""]
    return lines


def cli_page() -> str:
    """docs/reference/cli.md."""
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
    """docs/reference/playbooks.md: each root playbook with its plays in their order."""
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
    """docs/reference/exit-codes.md."""
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
    """The name of what is filled in at run time, or an ellipsis where the expression has none."""
    if isinstance(node, ast.Name):
        return f"<{node.id}>"
    if isinstance(node, ast.Attribute):
        return f"<{node.attr}>"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"<{node.slice.value!s}>"
    return "..."


def text_of(node: ast.AST, names: Mapping[str, list[str]]) -> list[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = (
            placeholder(part.value) if isinstance(part, ast.FormattedValue) else text_of(part, names)[0]
            for part in node.values
        )
        return ["".join(parts)]
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
    """Line, name and texts of each assignment of a text to a name."""
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, text in pairs:
                if isinstance(name, ast.Name) and (texts := text_of(text, {})):
                    yield node.lineno, name.id, texts


def default_severity(tree: ast.Module) -> str:
    """The severity that a file's own maker of findings gives where a call gives none."""
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        if function.name in MESSAGE_MAKERS:
            for node in (each for each in ast.walk(function) if isinstance(each, ast.Dict)):
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and key.value == "severity"
                        and isinstance(value, ast.Constant)
                    ):
                        return str(value.value)
    # Or the file has a maker of its own: finding = partial(doctor_finding, severity="warning").
    for call in (node.value for node in tree.body if isinstance(node, ast.Assign)):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "severity" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return "refusal"


def messages_in(path: Path) -> Iterator[tuple[str, str, str]]:
    """Severity, problem and remedy of each finding that a file makes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {name: texts for _, name, texts in assignments(tree.body)}
    severity = default_severity(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        made = sorted(assignments(ast.walk(function)))
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        before = 0
        for call in sorted(calls, key=lambda each: each.lineno):
            maker = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if maker not in MESSAGE_MAKERS or function.name in MESSAGE_MAKERS:
                continue
            # A name may be assigned anew for each finding: what was assigned since the last one counts.
            names = constants | {name: texts for line, name, texts in made if line <= call.lineno}
            since = {name for line, name, _ in made if before < line <= call.lineno}
            for name in since:
                names[name] = [
                    text
                    for line, each, texts in made
                    if each == name and before < line <= call.lineno
                    for text in texts
                ]
            before = call.lineno
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            found = [text_of(argument, names) for argument in arguments]
            sentences = [
                each
                for each in found
                if any(
                    " " in text and len(text) > 15 and not text.startswith(("-e <", "inventory <"))
                    for text in each
                )
            ]
            warns = maker == "warning" or severity == "warning" or ["warning"] in found
            if sentences:
                remedy = sentences[1][0] if len(sentences) > 1 else ""
                for problem in sentences[0]:
                    words = re.findall(r"[A-Za-z]+", re.sub("<[^>]*>", "", problem))
                    if len(words) > 2 and problem.endswith((".", ">")):
                        yield "warning" if warns else "refusal", problem, remedy


def messages_page() -> str:
    """docs/reference/messages.md."""
    files = [*ROOT.glob("roles/*/*_plugins/*.py"), *ROOT.glob("plugins/**/*.py")]
    lines: list[str] = []
    for word, title in MESSAGE_SOURCES.items():
        own = [path for path in files if word in str(path.relative_to(ROOT))]
        rows = sorted(
            {each for path in own for each in messages_in(path)}, key=lambda each: (each[1], each[2], each[0])
        )
        if rows:
            shown = ((cell(problem), cell(remedy), severity) for severity, problem, remedy in rows)
            lines += [f"## {title}", "", *table(("message", "what to type", "severity"), shown), ""]
    return page(
        "Messages",
        "The findings of the preflight check, of the network check and of `doctor.yml`, as the sources word "
        "them. A part in angle brackets is filled in at run time. A refusal stops the command before a host "
        "is changed; a warning stops nothing.",
        lines,
    )


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    made = {
        "settings.md": settings_page,
        "cli.md": cli_page,
        "playbooks.md": playbooks_page,
        "roles.md": roles_page,
        "modules.md": modules_page,
        "exit-codes.md": exit_codes_page,
        "messages.md": messages_page,
    }
    return {PAGES / name: make() for name, make in made.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="docs_reference.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name what is not current")
    args = parser.parse_args(argv)
    stale = 0
    for path, text in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if args.check:
            print(f"{path.relative_to(ROOT)} is not current: python -m scripts.docs_reference")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} written")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
