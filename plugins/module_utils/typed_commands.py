"""`TEXT | as_typed`: adds the options of the running command, such as -i, to the commands in a message.

Without the same -i, `ansible-playbook status.yml` in a message would show another fleet. An inventory from
ansible.cfg or ANSIBLE_INVENTORY needs no -i. lab.yml takes none, because it is about this machine. setup.yml
and doctor.yml also get the -e options in SETTINGS. If the running command was typed by its full name
(nanofleet.fleet.status), the commands in the message have full names too.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.parsing.splitter import parse_kv

SETTINGS = ("data_dir", "store_port")
"""Settings of the hosts' setup (data folder, port of the rendezvous store) that no run file contains."""
BY_NAME = "nanofleet.fleet."
"""Prefix of a playbook's full name, which is typed outside of a checkout."""
WITH_SETTINGS = ("setup.yml", "doctor.yml", f"{BY_NAME}setup", f"{BY_NAME}doctor")
COMMAND = re.compile(
    r"\bansible(?:-playbook (?=(?!lab\.yml)[\w/]+\.yml|nanofleet\.fleet\.(?!lab\b)\w)| (?=\S+ -m ))"
)
PLAYBOOK = re.compile(r"(\bansible-playbook )(?:playbooks/)?(\w+)\.yml\b")


def options(given: Sequence[str], usual: Sequence[str], asks_password: bool, folder: Path) -> str:
    """The options -i and -K that a command in a message needs, each followed by a space; "" for none.

    given: inventories of the running command. usual: the default inventories, which need no -i.
    asks_password: whether -K was given. folder: the current directory; paths below it become relative.
    """
    words = []
    for source in given if list(given) != list(usual) else ():
        path = Path(source)
        short = str(path.relative_to(folder)) if path.is_relative_to(folder) else source
        words += ["-i", shlex.quote(short)]
    return "".join(f"{word} " for word in [*words, *(["-K"] if asks_password else [])])


def logins(cli: Mapping[str, Any]) -> str:
    """The given options by which Ansible logs in and decrypts, each followed by a space.

    cli: the options of the running command, by Ansible's name. Those from ansible.cfg are left out.
    """
    user, key = cli.get("remote_user"), cli.get("private_key_file")
    words = ["-u", user] if user and user != constants.DEFAULT_REMOTE_USER else []
    words += ["--private-key", key] if key and key != constants.DEFAULT_PRIVATE_KEY_FILE else []
    words += ["--ask-vault-pass"] if cli.get("ask_vault_pass") else []
    for option, name in (("--vault-password-file", "vault_password_files"), ("--vault-id", "vault_ids")):
        words += [word for value in cli.get(name) or () for word in (option, value)]
    return "".join(f"{shlex.quote(word)} " for word in words)


def settings(extra_vars: Sequence[str], text: str = "") -> str:
    """The given -e options that setup.yml and doctor.yml also need (SETTINGS), each followed by a space.

    text: the message. A setting that it asks to write into the inventory is left out: -e would override it.
    """
    words = []
    for given in extra_vars:
        pairs = parse_kv(given) if given[:1] not in "@{[" else {}
        words += [
            "-e " + shlex.quote(f"{name}={shlex.quote(pairs[name])}")
            for name in SETTINGS
            if name in pairs and f"write {name}:" not in text
        ]
    return "".join(f"{word} " for word in words)


def typed(text: str, needed: str, settings: str = "") -> str:
    """`text` with options in its ansible commands, before the name of the playbook.

    needed: options to insert in each command (the result of `options`). settings: options to insert before
    setup.yml and doctor.yml, too (the result of `settings`).
    """

    def completed(found: re.Match[str]) -> str:
        return found[0] + needed + settings * text[found.end() :].startswith(WITH_SETTINGS)

    return COMMAND.sub(completed, text)


def as_typed(text: Any, data: str = "") -> Any:
    """A text, or a list of texts, in which every command has the options of the running command.

    data: the dataset's folder, if the text is about the dataset. If that folder has no manifest, the hosts
    were set up with another folder, and setup.yml gets `-e data_dir=FOLDER` for the person to fill in.
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
    ) + logins(cli)
    given = settings(cli.get("extra_vars") or (), str(text))
    if data and "data_dir=" not in given and not (Path(data) / "manifest.json").exists():
        given += "-e data_dir=FOLDER "
    return typed(str(text), needed, given)
