"""What the documents may claim: commands and options that exist, links that lead somewhere, figures with
where they were measured, reference pages that are current."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import known_names

from fleet.__main__ import parser as fleet_parser
from scripts import docs_messages, docs_reference
from trainer.__main__ import make_parser
from trainer.config import RunConfig
from trainer.health.status_record import RunStatusRecord
from trainer.tracking.names import METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted(DOCS.rglob("*.md"))]
TYPED = [page for page in PAGES if docs_reference.MARK not in page.read_text()]
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
TASKS = sorted([*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml")])
SPEED = re.compile(r"\d\.\d+x\b|\d\.\d+ times one host|\d s a step|\d tok/s")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def each_page(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


# -- claims ------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_clones_this_repository_and_no_other() -> None:
    clones = re.findall(r"git clone (\S+)", (ROOT / "README.md").read_text())
    assert clones
    assert all(address.startswith("<this") for address in clones), clones


@each_page([page for page in TYPED if page.name != "CHANGELOG.md"])
def test_speeds_show_where_they_were_measured(page: Path) -> None:
    if SPEED.search(FENCE.sub("", page.read_text())):
        assert "containers on one machine" in " ".join(page.read_text().split()).replace("*", "")


@each_page(sorted([*DOCS.glob("performance.md"), *(DOCS / "research").glob("*.md")]))
def test_speeds_show_where_they_were_measured_before_the_first_of_them(page: Path) -> None:
    text = " ".join(page.read_text().split())
    first = re.search(r"\| one host \||\| `dense`, float32 \||`?tok/s", text)
    assert first
    assert "containers on one machine" in text[: first.start()]


def test_the_loss_curve_is_claimed_with_its_tolerance_and_its_exception() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    claim = text[text.index("the loss curve does not") :][:500]
    assert "1e-3" in claim
    assert "`local`" in claim


# -- links -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and forges make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"[\s]+", "-", plain))
    return found


@each_page(PAGES)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"


# -- commands ----------------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[str]:
    """What a reader is shown to type: lines of fenced blocks, and code in a sentence."""
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            typed = line.strip()
            if language == "console" and typed.startswith("$ "):
                yield typed[2:]
            elif language in ("sh", "bash"):
                yield typed
    recorded = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", FENCE.sub("", text), flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", recorded):
        if re.match(r"(sudo )?(ansible-playbook|make|python3? -m|python3? scripts|torchrun|pytest) ", code):
            yield code
        elif re.match(r"\w+\.yml -e ", code):
            yield f"ansible-playbook {code}"
        elif re.match(r"-e \w+=", code):
            yield f"ansible-playbook train.yml {code}"


@cache
def known_settings() -> frozenset[str]:
    wiring = yaml.safe_load((ROOT / "playbooks" / "group_vars" / "all.yml").read_text())
    return frozenset(
        {
            *RunConfig.field_names(),
            *docs_reference.declared(),
            *known_names(),
            *(name for name in wiring if name.startswith("nanofleet_")),
        }
    )


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def options_of(command: str, module: str) -> set[str]:
    """The options of a subcommand; raises KeyError where there is no such subcommand."""
    top = make_parser() if module == "trainer" else fleet_parser()
    (choices,) = (action.choices for action in top._actions if isinstance(action.choices, dict))
    return set(choices[command]._option_string_actions)


def problem_with(command: str) -> str:
    """Why a documented command cannot be typed; empty where it can."""
    if command.startswith("cd ~"):  # a command of another project
        return ""
    parts = re.sub(r"<[^>]*>", "X", command).split("&&")
    return "; ".join(filter(None, map(problem_with_one, parts)))


def problem_with_one(command: str) -> str:
    words = shlex.split(command, comments=True)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word) or word == "VALUE"]
    while words and words[0] in ("sudo", "nice", "export"):
        words = words[1:]
    if not words:
        return ""
    if words[0] == "ansible-playbook":
        playbooks = [
            word for word in words[1:] if word.endswith(".yml") and "=" not in word and "/" not in word
        ]
        missing = [name for name in playbooks if not (ROOT / name).is_file()]
        given = [after.partition("=")[0] for word, after in pairwise(words) if word == "-e"]
        unknown = [name for name in given if name not in known_settings() and not name.isupper()]
        return f"unknown: {missing + unknown}" if missing or unknown else ""
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return "" if set(targets) <= make_targets() else f"unknown: {targets}"
    if words[0] == "pytest":
        paths = [word for word in words[1:] if word.startswith("tests/")]
        return "" if all((ROOT / path).exists() for path in paths) else f"missing: {paths}"
    if words[0].startswith("python") and len(words) > 1 and words[1].startswith("scripts/"):
        return "" if (ROOT / words[1]).is_file() else f"missing: {words[1]}"
    if "-m" in words:
        module, *rest = words[words.index("-m") + 1 :]
        if module.startswith(("benchmarks.", "scripts.")):
            return "" if (ROOT / f"{module.replace('.', '/')}.py").is_file() else f"missing: {module}"
        if module in ("trainer", "fleet") and rest:
            try:
                options = options_of(rest[0], module)
            except KeyError:
                return f"python -m {module} has no {rest[0]}"
            given = [word.partition("=")[0] for word in rest[1:] if word.startswith("--")]
            unknown = [option for option in given if option not in options]
            return f"unknown: {unknown}" if unknown else ""
    return ""


@each_page([page for page in TYPED if page.name != "CHANGELOG.md"])
def test_documented_commands_exist(page: Path) -> None:
    found = {command: problem_with(command) for command in commands_in(page.read_text())}
    assert not {command: problem for command, problem in found.items() if problem}


@pytest.mark.parametrize(
    "command",
    [
        "ansible-playbook trian.yml",
        "ansible-playbook train.yml -e dept=8",
        "make dmeo",
        "python -m trainer smaple --checkpoint X",
        "torchrun --nproc-per-node 2 -m trainer train --dta-dir data",
        "python scripts/nothing.py",
        "python -m benchmarks.nothing",
        "python -m scripts.nothing",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert problem_with(command)


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    block = "```console\n$ make demo   # comment\noutput\n```\n"
    text = f"{block}Type `ansible-playbook stop.yml` or `-e depth=4`.\n"
    assert list(commands_in(text)) == [
        "make demo   # comment",
        "ansible-playbook stop.yml",
        "ansible-playbook train.yml -e depth=4",
    ]


# -- reference ---------------------------------------------------------------------------------------------


def test_every_message_has_one_code_and_stands_in_the_reference() -> None:
    """A code is written once: as the first argument of the call that makes the finding, or in YAML."""
    made = [
        node.args[0]
        for path in ROOT.glob("plugins/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in docs_messages.FINDING_MAKERS
        if path.name != "findings.py"
    ]
    codes = [code for node in made for code in docs_messages.text_of(node, {})]
    assert len(made) > 50
    assert all(docs_messages.text_of(node, {}) for node in made)
    in_yaml = [message.code for path in TASKS for message in docs_messages.messages_in_yaml(path)]
    assert len(in_yaml) > 30
    codes += in_yaml
    assert all(re.fullmatch(r"NF[0-7][0-9]{2}", code) for code in codes)
    assert len(codes) == len(set(codes)), sorted(code for code in set(codes) if codes.count(code) > 1)
    page = docs_reference.messages_page()
    assert [code for code in codes if f"| {code} |" not in page] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at {{ __tracker_url }}", "at <tracker url>"),
        ("{{ 'Stopped. Fix: start it' if \"can't\" in stderr else 'Failed' }}.", "Stopped. Fix: start it."),
        ("has {{ \"a\" if lacks else 'b' }}{% if more %} more{% endif %}", "has a more"),
    ],
)
def test_an_expression_is_shown_as_a_text_a_name_or_dots(text: str, shown: str) -> None:
    assert docs_messages.without_expressions(text) == shown


def test_the_page_of_messages_has_no_expression() -> None:
    assert not re.findall(r"\{\{|\}\}|\{%|%\}", docs_reference.messages_page())


def failures(value: object) -> Iterator[str]:
    """The message of every task of a YAML document that fails: `fail_msg` of assert, `msg` of fail."""
    if isinstance(value, list):
        for inner in value:
            yield from failures(inner)
    elif isinstance(value, dict):
        yield from (str(task["msg"]) for key, task in value.items() if key == "ansible.builtin.fail")
        yield from (text for key, text in value.items() if key == "fail_msg")
        for inner in value.values():
            yield from failures(inner)


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_task_that_fails_has_a_message_with_a_code(path: Path) -> None:
    """The messages of a loop have their codes in its items."""
    for message in failures(yaml.safe_load(path.read_text())):
        assert re.match(r"NF\d{3}: |\{\{ item\.", message), message


@pytest.mark.parametrize("script", ["docs_reference", "docs_figures"])
def test_generated_pages_are_current(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_that_a_person_may_set_is_on_the_page_of_settings() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    assert not [name for name in known_settings() if f"| `{name}` |" not in page]


def source_of(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", ["run-files.md", "metrics.md"])
def test_files_and_fields_of_a_run_are_those_of_the_sources(name: str) -> None:
    """The first column of each table names what the trainer or the unit writes."""
    source = source_of("trainer") + "".join(path.read_text() for path in ROOT.glob("roles/*/vars/*.yml"))
    page = (DOCS / "reference" / name).read_text()
    first = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    assert first
    for cell in first:
        for shown in re.findall(r"`([^`]+)`", cell):
            word = re.split(r"RANK|NNNNNN|\d", shown)[0].rstrip("/-")
            phase = re.fullmatch(r"(data|forward|backward|sync|optimizer)_s", word)
            assert (phase[1] if phase else word) in source, shown


def test_the_fields_of_the_heartbeat_are_those_of_its_record() -> None:
    page = (DOCS / "reference" / "run-files.md").read_text()
    table = page.partition("## Fields of the heartbeat\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", "".join(cells))) == set(RunStatusRecord().heartbeat())


def test_every_figure_of_a_step_is_on_the_page_of_metrics() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    assert not [figure for figure in METRICS if f"`{figure}`" not in page]


def test_every_playbook_is_in_the_readme() -> None:
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    playbooks = [path.name for path in ROOT.glob("*.yml") if "import_playbook" in path.read_text()]
    assert playbooks
    assert not [name for name in playbooks if not any(f"ansible-playbook {name}" in row for row in table)]


def test_each_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
