"""Write the reference pages of the documentation and of the roles' READMEs from the sources.

    python -m scripts.docs_reference            # write docs/reference/*.md and roles/*/README.md
    python -m scripts.docs_reference --check    # write nothing, name the pages that are not current

First the defaults are updated in the files that repeat them (scripts/docs_defaults.py). The pages of settings
come from RunConfig, the argument specs of the roles and the list of settings that -e accepts; the page of
commands from the argument parsers; the page of messages from the sources (scripts/docs_messages.py). In a
README only the part between two markers is written; a README without markers gets a section at its end. The
pages are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.plugin_docs import read_docstring
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import declared, known_names

import fleet.__main__
import trainer.__main__
from scripts import docs_defaults
from scripts.docs_messages import messages
from scripts.generated import ROOT, stale, update, write
from trainer.config import RunConfig
from trainer.formatting import markdown_table
from trainer.outcome import BAD_INPUT_EXIT_CODE, EXIT_CODES
from trainer.presets import PRESETS

PAGES = ROOT / "docs" / "reference"
MARK = "<!-- Written by scripts/docs_reference.py. Edit the sources, then run it again. -->"
BEGIN, END = "<!-- From meta/argument_specs.yml by scripts/docs_reference.py: -->", "<!-- end -->"
SECTIONS = {
    "identity": "Define the result of the run. They are fixed once the run has begun.",
    "horizon": "Define the length of the run. They may become longer on resume.",
    "runtime": "May change at every start of the run.",
}
PRESETS_TEXT = (
    "`train.yml -e preset=NAME` and `python -m trainer train --preset NAME` set several settings of a run. "
    "They replace those of the inventory. A setting that is given beside the preset, with `-e` or as an "
    "option, replaces that of the preset."
)
Options = Mapping[str, Mapping[str, Any]]
Specs = Mapping[str, Mapping[str, Any]]  # of a role, by entry point
MESSAGE_AREAS = {
    "NF0": "Settings and inventory",
    "NF1": "Hosts",
    "NF2": "Network",
    "NF3": "Installed environments",
    "NF4": "Runs",
    "NF5": "Doctor",
    "NF6": "Data and tracker",
    "NF7": "Lab",
}


# -- Markdown ----------------------------------------------------------------------------------------------


def cell(text: Any) -> str:
    """`text` for one cell of a Markdown table: on one line, escaped; C(x), V(x) and O(x) become code."""
    flat = " ".join(str(text).split())
    flat = re.sub(r"\b[CVO]\(([^)]*)\)", r"`\1`", flat)
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return markdown_table([[*head], *([*row] for row in rows)], aligned=False).splitlines()


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


def role_specs() -> Iterator[tuple[Path, Specs]]:
    """Yield (folder of a role, its argument specs by entry point) for each role."""
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        yield path.parents[1], yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]


def options_in(specs: Specs) -> Options:
    """The options of all entry points of a role: name -> its spec."""
    return {name: option for spec in specs.values() for name, option in (spec.get("options") or {}).items()}


def sentences(description: str | list[str]) -> str:
    """A description from YAML as one text. description: a text or a list of texts."""
    return description if isinstance(description, str) else " ".join(description)


def option_table(noun: str, specs: Specs) -> list[str]:
    """The lines of a table of the options of `specs`; [] if there are no options.

    noun: the head of the first column. An option is listed once. Its entry points are named unless all entry
    points have it.
    """
    rows = []
    for name, option in options_in(specs).items():
        takers = [entry for entry, spec in specs.items() if name in (spec.get("options") or {})]
        only = "" if len(takers) == len(specs) else f" ({', '.join(f'`{entry}`' for entry in takers)})"
        kind = str(option.get("type", "str"))
        kind += f" of {option['elements']}" if option.get("elements") else ""
        kind += f": {', '.join(map(str, option['choices']))}" if option.get("choices") else ""
        limits = "min" in option or "max" in option
        kind += f", {option.get('min', '')} to {option.get('max', '')}" if limits else ""
        default = "required" if option.get("required") else code(option.get("default"))
        rows.append((f"`{name}`", cell(kind), cell(default), cell(sentences(option["description"])) + only))
    return [*table((noun, "type", "default", "meaning"), rows), ""] if rows else []


def entry_table(specs: Specs) -> list[str]:
    """The lines of a table of a role's entry points."""
    rows = ((f"`{name}`", cell(spec["short_description"])) for name, spec in specs.items())
    return [*table(("entry point", "what it does"), rows), ""]


def settings_page() -> str:
    """The text of docs/reference/settings.md."""
    lines = ["## Settings of a run", ""]
    for section, meaning in SECTIONS.items():
        fields = [each for each in dataclasses.fields(RunConfig) if each.metadata.get("section") == section]
        rows = [
            (f"`{each.name}`", str(each.type), code(each.default), cell(each.metadata["help"]))
            for each in fields
        ]
        lines += [f"### {section.capitalize()}", "", meaning, ""]
        lines += [*table(("setting", "type", "default", "meaning"), rows), ""]
    lines += ["## Presets", "", PRESETS_TEXT, ""]
    for name, preset in PRESETS.items():
        lines += [f"### {name}", "", f"{preset.help.capitalize()}.", ""]
        lines += [*table(("setting", "value"), ((f"`{k}`", code(v)) for k, v in preset.settings.items())), ""]
    known = declared()
    lines += ["## Settings of commands and hosts", "", *option_table("setting", {"": {"options": known}})]
    settable = known_names().keys() - known.keys()
    for role, specs in role_specs():
        options = {name: option for name, option in options_in(specs).items() if name in settable}
        if options:
            lines += [
                f"## {role.name.capitalize()}",
                "",
                *option_table("setting", {"": {"options": options}}),
            ]
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
        lines += [f"## {role.name}", "", *entry_table(specs), *option_table("variable", specs)]
    return page(
        "Roles",
        "Each role gives a host one capability. The playbooks set these variables from the "
        "[settings](settings.md); set them yourself where you use a role in a playbook of your own.",
        lines,
    )


def readme(role: Path, specs: Specs) -> str:
    """The text of a role's README with its generated section from `specs`."""
    before, _, rest = (role / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    entries = [] if "| entry point |" in before else entry_table(specs)
    body = "\n".join([BEGIN, "", *entries, *option_table("variable", specs), END])
    if not rest:
        return f"{before.rstrip()}\n\n## Variables\n\n{body}\n"
    return before + body + rest.partition(END)[2]


def modules_page() -> str:
    """The text of docs/reference/modules.md, from the documentation of each module and action."""
    lines: list[str] = []
    for path in sorted(ROOT.glob("plugins/modules/*.py")):
        sidecar = path.with_suffix(".yml")
        about = read_docstring(str(sidecar if sidecar.is_file() else path))["doc"]
        texts = about["description"] if isinstance(about["description"], list) else [about["description"]]
        lines += [f"## {path.stem}", "", f"{cell(about['short_description'])}.", ""]
        lines += [*(f"- {cell(text)}" for text in texts), "", *option_table("option", {"": about})]
    return page(
        "Modules",
        "The Ansible modules of the project: what has state on a host and no existing module covers; and its "
        "actions, which decide on the controller.",
        lines,
    )


# -- commands ----------------------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield (option with a name for its value, help text) for each option of a command, as table cells."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = ", ".join(action.option_strings) or action.dest
        value = formatter._format_args(action, action.dest.upper()) if action.option_strings else ""
        required = " Required." if action.required and action.option_strings else ""
        yield f"`{name} {value}`".replace(" `", "`"), cell(formatter._expand_help(action)) + required


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
    targets = re.findall(
        r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    make = table(("target", "what it does"), ((f"`make {name}`", cell(text)) for name, text in targets))
    return page(
        "Commands",
        "`python -m trainer` trains and needs no fleet. `python -m fleet` runs the playbooks with a live "
        "display. `make` builds, tests and measures in a checkout.",
        [
            *command_lines("python -m trainer", trainer.__main__.make_parser()),
            *command_lines("python -m fleet", fleet.__main__.parser()),
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
            lines.append(f"{number}. {cell(play.get('name', '').partition('{{')[0])}{hosts}")
        lines.append("")
    return page(
        "Playbooks",
        "Each command is a playbook in the root of the repository. The list shows its plays in their order, "
        "and the hosts of a play where it names them. Every playbook may be run again.",
        lines,
    )


def exit_codes_page() -> str:
    """The text of docs/reference/exit-codes.md."""
    meaning = {
        "finished": "Every step is done.",
        "stopped": "A person asked for the end, with `stop.yml` or a file named `stop`.",
        "retryable": "A restart can help, as after the loss of a peer. The unit restarts.",
        "final": "A restart cannot help, as after a loss that is not a number. The unit does not restart.",
    }
    rows = [(f"`{value}`", name, meaning[name]) for name, value in EXIT_CODES.items()]
    rows.append((f"`{BAD_INPUT_EXIT_CODE}`", "bad input", "A setting, a file or the data cannot be used."))
    rows.append(("`130`", "interrupted", "Ctrl-C. Nothing was saved since the last checkpoint."))
    console = (fleet.__main__.parser().epilog or "").removeprefix("exit codes: ")
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


def messages_page() -> str:
    """The text of docs/reference/messages.md."""
    found, lines = messages(), list[str]()
    for area, title in MESSAGE_AREAS.items():
        shown = (map(cell, message) for message in found if message.code.startswith(area))
        lines += [f"## {title}", "", *table(("code", "message", "fix", "severity"), shown), ""]
    return page(
        "Messages",
        "The messages of the playbooks that stop a command or warn: the findings of the checks and of "
        "`doctor.yml`, and the failures of tasks. A "
        "code keeps its meaning in later releases. A part in angle brackets is filled in at run time. Where "
        "the wording depends on the case, one wording is shown. *This host* is the host that stands before "
        "the message, and `(on HOST)` after a command is where to type it. A refusal stops the command "
        "before a host is changed; only NF301 to NF303 come after `setup.yml` has installed the "
        "environments. An error stops the command too. With an error of `doctor.yml` the hosts cannot train "
        "together. A warning stops nothing.",
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
    if "--check" not in sys.argv:
        update(stale(docs_defaults.files()))  # before the pages, which are read from them
    sys.exit(write("docs_reference", __doc__ or "", docs_defaults.files() | pages()))
