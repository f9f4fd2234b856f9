"""`TEXT | as_typed`: the commands in a message with the -i and -K that this very command was given.

Without the person's own -i, `ansible-playbook status.yml` in a message would show another fleet. An inventory
that ansible.cfg or ANSIBLE_INVENTORY names needs no -i. lab.yml is about this machine and takes none.
setup.yml and doctor.yml also get the -e of this command that they depend on. Where this command was typed by
its full name (nanofleet.fleet.status), so are the commands.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.parsing.splitter import parse_kv

SETTINGS = ("data_dir", "store_port")
"""Where the data are and which port the run takes: what the hosts are set up for, not what a run keeps."""
BY_NAME = "nanofleet.fleet."
"""How a playbook begins that was typed by its full name, as outside of a checkout."""
TOLD = ("setup.yml", "doctor.yml", f"{BY_NAME}setup", f"{BY_NAME}doctor")
COMMAND = re.compile(
    r"\bansible(?:-playbook (?=(?!lab\.yml)[\w/]+\.yml|nanofleet\.fleet\.(?!lab\b)\w)| (?=\S+ -m ))"
)
PLAYBOOK = re.compile(r"(\bansible-playbook )(?:playbooks/)?(\w+)\.yml\b")


def options(given: Sequence[str], usual: Sequence[str], asks_password: bool, folder: Path) -> str:
    """What a command needs besides, each followed by a blank; paths below `folder`, where it is typed, short.

    given, usual: the inventories of this command, and those of one without -i.
    """
    words = []
    for source in given if list(given) != list(usual) else ():
        path = Path(source)
        short = str(path.relative_to(folder)) if path.is_relative_to(folder) else source
        words += ["-i", shlex.quote(short)]
    return "".join(f"{word} " for word in [*words, *(["-K"] if asks_password else [])])


def settings(extra_vars: Sequence[str]) -> str:
    """The part of the given -e options that setup.yml and doctor.yml need as well."""
    words = []
    for given in extra_vars:
        pairs = parse_kv(given) if given[:1] not in "@{[" else {}
        words += ["-e " + shlex.quote(f"{name}={pairs[name]}") for name in SETTINGS if name in pairs]
    return "".join(f"{word} " for word in words)


def typed(text: str, needed: str, settings: str = "") -> str:
    """A text whose commands have what they need besides (see options and settings)."""

    def completed(found: re.Match[str]) -> str:
        told = settings if text[found.end() :].startswith(TOLD) else ""
        return found[0] + needed + told

    return COMMAND.sub(completed, text)


def as_typed(text: Any, data: str = "") -> Any:
    """A text, or a list of them, with every command as the person has to type it.

    data: the folder that setup.yml would send, where the text is about it; without a manifest it is not the
    one that the hosts were set up with, and the person has to say which that was.
    """
    if isinstance(text, list):
        return [as_typed(line, data) for line in text]
    cli = context.CLIARGS
    if any(str(playbook).startswith(BY_NAME) for playbook in cli.get("args") or ()):
        text = PLAYBOOK.sub(rf"\1{BY_NAME}\2", str(text))
    needed = options(
        cli.get("inventory") or (),
        constants.DEFAULT_HOST_LIST,
        bool(cli.get("become_ask_pass")),
        Path(os.environ.get("PWD", os.getcwd())),
    )
    told = settings(cli.get("extra_vars") or ())
    if data and "data_dir=" not in told and not (Path(data) / "manifest.json").exists():
        told += "-e data_dir=FOLDER "
    return typed(str(text), needed, told)
