"""Collects the messages of all checks from the source code, for docs/reference/messages.md.

A message is written in Python as a call of finding(), warning() or doctor_finding(), and in YAML as a text
that begins with its code, such as `NF601: The data differ. Fix: ansible-playbook setup.yml`.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.generated import ROOT

FINDING_MAKERS = ("finding", "warning", "doctor_finding")
IN_YAML = re.compile(r"(NF\d{3}): (.*?)(?:\s+Fix: (.*))?", re.DOTALL)
EXPRESSION_IN_YAML = re.compile(r"\{\{(.*?)\}\}|\{%.*?%\}", re.DOTALL)
NAME_IN_YAML = re.compile(r"[A-Za-z_][\w.]*")
# Names of variables in messages, and the words that stand for each.
WORDS = {
    "inventory_hostname": "host",
    "groups": "host",
    "ansible_play_hosts_all": "host",
    "lost": "hosts",
    "launch_by_host": "report of each host, with its fix",
    "run_state_by_host": "list of the runs, and what to type",
    "claim_refusals": "reason and fix for each host",
    "problem": "reason and fix",
    "several": "list of the runs, and the command that names one of them",
    "launch_busy": "reason and fix",
    "serve_others": "program",
    "who": "program",
    "message": "SETTING is VALUE: it takes ...",
    "end": "stop command",
    "ssh": "ssh command",
    "typed": "commands",
    "needs": "seconds of network that a step needs",
    "each": "value on each host",
    "skew": "seconds",
    "evaluate_steps": "list of its checkpoints",
    "evaluate_newest": "its newest checkpoint",
    "mbit": "rate",
    "dataset_output": "error",
    "ansible_failed_task.name": "task",
    "ansible_failed_result": "error",
}
# Names of variables that hold a whole sentence or command, and an example of it.
EXAMPLES = {
    "dataset_fix": "ansible-playbook setup.yml",
    "dataset_findings": "<host>: shard_00003.parquet is missing.",
    "dataset_differing": "<host> has training rows with the digests <digests>, the others have <digests>.",
    "findings": "shard_00003.parquet is missing",
    "claim_refusals": "<host> serves the fleet <fleet>: <hosts>; set up by <user> at <time>. This fleet "
    "is <this fleet>, and a host serves one fleet at a time. Fix: if both are the same fleet, put fleet_id: "
    "<fleet> into group_vars/fleet.yml of the inventory; if <host> is to leave the other fleet: "
    "ansible-playbook reset.yml -e fleet_id=<fleet> -e reset_confirm=true --limit <host>",
    "path_problem": "<host> has no route to <peer>: Network is unreachable",
    "inventory_change": "connect both to one network, or set fleet_address of <peer> in the inventory to its "
    "address on the network of <host>",
    "_link_check_and_settings": "find the cause: cat /sys/class/net/<interface>/speed; tc qdisc show dev "
    "<interface> (on <host>; the first prints the rate of the link in Mbit/s, the second a limit such as tbf "
    "if there is one; then check cable, port and switch); or start a new run, with your other settings, that "
    "needs less of the network: ansible-playbook train.yml -e sync=local (docs/how-to/slow-link.md)",
    "needs": " A step of depth <depth> and <tokens> tokens is predicted to take <seconds> s with sync=exact "
    "(transfers: <seconds> s).",
    "run_remove_save_first": "ansible-playbook stop.yml -e run_id=<run> (saves and stops it; if the host "
    "serves another fleet, with -i and the inventory of that fleet), then repeat the command. Or, if what is "
    "not saved may be lost:",
    "run_stop_leave_refusal": "<host> is the coordinator, and the run <run> does not continue without it. "
    "Fix: to end the run on all hosts: ansible-playbook stop.yml -e run_id=<run>",
    "clock_fix": "sudo timedatectl set-ntp true (on <host>; if NTP is not supported there: sudo apt install "
    "systemd-timesyncd; if this is reported for all hosts, correct the clock of the controller)",
    "_imported": "copy the folder to where the unit can read it: sudo mkdir -p /var/lib/nanofleet/imported "
    "&& sudo cp -r <path> /var/lib/nanofleet/imported/ && sudo chmod -R a+rX "
    "/var/lib/nanofleet/imported/<folder> (on <host>), then repeat the command with "
    "-e from_checkpoint=/var/lib/nanofleet/imported/<folder>",
    "range_change": "give <interface> another range of addresses (on <host>)",
    "run_state_unknown": "No host that answers has a run <run>. Known runs: <runs>. Fix: repeat the command "
    "with one of them: -e run_id=NAME",
    "over": "<interface>",
    "other_port": "use another port: write store_port: PORT into group_vars/fleet.yml of the inventory, "
    "then: ansible-playbook setup.yml",
    "of_ports": "sport = :<port>",
    "reset_command": "ansible-playbook reset.yml --limit <host> -e reset_confirm=true",
    "former_reset_command": "ansible-playbook reset.yml -i <address>, -u USER -e fleet_id=<fleet> "
    "--limit <address> -e reset_confirm=true",
}


class Message(NamedTuple):
    """A message that a check can report. Values that are known only at run time are in angle brackets.

    The fields are those of a finding (see plugins/module_utils/findings.py).
    """

    code: str
    problem: str
    remedy: str
    severity: str


def shown_name(name: str) -> str:
    """The text that the page shows instead of the variable `name`.

    If EXAMPLES has an entry `name`, the text is this entry. Else the text is in angle brackets: the entry in
    WORDS, or if there is none, the name with blanks instead of underscores.
    """
    if name in EXAMPLES:
        return EXAMPLES[name]
    name = name.strip("_")
    if name in EXAMPLES:
        return EXAMPLES[name]
    return f"<{WORDS.get(name) or name.replace('_', ' ')}>"


def placeholder(node: ast.AST) -> str:
    """The text that stands for a value known only at run time: <NAME>, or "..." if it has no name.

    NAME is that of the variable, attribute, key or called function. For a call of a Python builtin, NAME is
    that of the first argument; for a call of a method, such as name.strip(), that of the object.
    """
    if isinstance(node, ast.Name):
        return shown_name(node.id)
    if isinstance(node, ast.Attribute):
        return shown_name(node.attr)
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return shown_name(key) if isinstance(key, str) else placeholder(node.value)
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name):
            of_python = hasattr(builtins, function.id) and node.args
            return placeholder(node.args[0]) if of_python else shown_name(function.id)
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self":
                return shown_name(function.attr)
            return placeholder(node.args[0] if isinstance(function.value, ast.Constant) else function.value)
    if isinstance(node, ast.BinOp):
        return placeholder(node.left)
    if isinstance(node, ast.BoolOp):
        return placeholder(node.values[0])
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return placeholder(node.generators[0].iter)
    return "..."


def text_of(node: ast.AST, names: Mapping[str, list[str]]) -> list[str]:
    """All texts that an expression can evaluate to; [] if it is not a text. names: {variable: its texts}."""

    def one(part: ast.AST) -> str:
        return (text_of(part, names) or [placeholder(part)])[0]

    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.FormattedValue):
        return [one(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(one(part) for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        if not (text_of(node.left, names) or text_of(node.right, names)):
            return []
        return [left + one(node.right) for left in text_of(node.left, names) or [placeholder(node.left)]]
    if isinstance(node, ast.IfExp):
        texts = text_of(node.body, names)
        return texts + text_of(node.orelse, names) if texts else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        words = {word.arg: one(word.value) for word in node.keywords if word.arg}
        return [
            re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], shown_name(found[1])), text)
            for text in text_of(node.func.value, names)
        ]
    if isinstance(node, ast.Call | ast.Subscript | ast.Dict):
        return [text for row in rows_of(node, names) for text in text_of(row[-1], names)][:1]
    return names.get(node.id, []) if isinstance(node, ast.Name) else []


def rows_of(node: ast.AST, names: Mapping[str, Any]) -> list[list[ast.expr]]:
    """The rows of a table in the source code, each as a list of expressions.

    A table is a dict, whose rows are [key, value, ...], or a tuple of tuples, whose rows are the elements of
    the inner tuples. node: the table, its name NAME, NAME[...], NAME.get(...) or NAME.items(), each of which
    gives all rows of the table; anything else gives []. names: has the rows of each table under the key
    "table NAME".
    """
    if isinstance(node, ast.Name):
        return names.get(f"table {node.id}", [])
    if isinstance(node, ast.Subscript):
        return rows_of(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return rows_of(node.func.value, names) if node.func.attr in ("get", "items") else []
    if isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key]
        return [[key, *(value.elts if isinstance(value, ast.Tuple) else [value])] for key, value in pairs]
    if isinstance(node, ast.Tuple):
        return [each.elts for each in node.elts if isinstance(each, ast.Tuple)]
    return []


def looped(node: ast.For, names: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, texts) for each name that a loop over a table assigns, with the texts of the first row.

    names: as for `rows_of` and `text_of`.
    """
    targets = [each for each in ast.walk(node.target) if isinstance(each, ast.Name)]
    for row in rows_of(node.iter, names)[:1]:
        if len(row) == len(targets):
            yield from ((name.id, text_of(value, names)) for name, value in zip(targets, row, strict=True))


def assigned(node: ast.Assign, names: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, texts) for each name that a statement assigns; texts is [] if the value is not a text.

    names: as for `rows_of` and `text_of`.
    """
    target, value = node.targets[0], node.value
    targets: list[ast.expr] = target.elts if isinstance(target, ast.Tuple) else [target]
    values: list[ast.expr | None] = [value]
    if isinstance(target, ast.Tuple):
        values = [*value.elts] if isinstance(value, ast.Tuple) else []
        if row := rows_of(value, names)[:1]:
            values = [*row[0][1:]]
        if len(values) != len(targets):
            values = [None] * len(targets)
    for each, its in zip(targets, values, strict=True):
        if isinstance(each, ast.Name):
            yield each.id, text_of(its, names) if its else []


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """The names that a module assigns outside of functions, as {name: texts} and {"table NAME": rows}."""
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            constants |= dict(assigned(node, constants))
            constants |= {
                f"table {name.id}": rows_of(node.value, constants)
                for name in node.targets
                if isinstance(name, ast.Name)
            }
    return constants


def default_severity(tree: ast.Module) -> str:
    """The severity of a finding in the module `tree` if the call that makes it names no severity."""
    source = ast.unparse(tree)
    partial = re.search(r"^finding = partial\(doctor_finding, severity='(\w+)'\)", source, re.MULTILINE)
    return partial[1] if partial else "error" if "doctor_finding" in source else "refusal"


def messages_in(path: Path) -> Iterator[Message]:
    """Yield each message that a Python file can report."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = constants_of(tree)
    severity = default_severity(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names, reported = dict(constants), set(constants)
        for node in sorted(ast.walk(function), key=lambda each: getattr(each, "lineno", 0)):
            if isinstance(node, ast.Assign):
                # A name may be assigned once for each finding: the values since the last finding count.
                for name, texts in list(assigned(node, names)):
                    names[name] = texts if name in reported else names.get(name, []) + texts
                    reported.discard(name)
            if isinstance(node, ast.For):
                names |= dict(looped(node, names))
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


def shown_expression(found: re.Match[str]) -> str:
    """The text that the page shows for a Jinja expression: its literals, and `shown_name` of variables.

    found: a match of EXPRESSION_IN_YAML. For a statement of Jinja the text is "". Of `A if B else C` only A
    is shown. The first filter and all that follows it are left out, except a factor of a number. A part
    without a literal and without a variable is shown as "...".
    """
    if not found[1]:
        return ""
    inner = found[1].strip().removeprefix("(").removeprefix("[")
    if factor := re.fullmatch(r"(?:(\d+) \* )?(\w+) \| int(?: \* (\d+))?", inner):
        return " * ".join(filter(None, (factor[1] or factor[3], shown_name(factor[2]))))
    inner = re.split(r" if |\s\|\s", inner, maxsplit=1)[0]
    parts = []
    for part in inner.split(" ~ "):
        if text := re.match(r"""\s*'([^']*)'|\s*"([^"]*)\"""", part):
            parts.append(text[1] or text[2] or "")
        elif name := NAME_IN_YAML.search(part):
            keys = (name[0].strip("_"), name[0].split(".")[-1])
            parts.append(shown_name(next((key for key in keys if key in WORDS or key in EXAMPLES), keys[1])))
        else:
            parts.append("...")
    return "".join(parts)


def without_expressions(text: str) -> str:
    """The Jinja template `text` as the page shows it: each expression is replaced by `shown_expression`."""
    return EXPRESSION_IN_YAML.sub(shown_expression, text)


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
