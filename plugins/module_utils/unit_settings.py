"""Settings of systemd units: quoted values, the addresses that a run exchanges packets with.

A quoted value stays one value in systemd's files and command lines (systemd.syntax(7)):

- `systemd_quote`: one word of a setting that takes several words, such as ExecStart= or Environment=. Set
file=true in a unit file, where % begins a specifier, and command=true in a command, where $ begins a
variable.
- `systemd_line`: a setting that takes the rest of its line, such as User=.
- `systemd_env`: the value of a line NAME=VALUE in an environment file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import is_loopback, resolved

PLAIN = re.compile(r"[][A-Za-z0-9_@+=:,./-]+")


def _text(value: Any) -> str:
    """The value as text. Raises AnsibleFilterError for control characters: a line break ends the setting."""
    text = str(value)
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise AnsibleFilterError(
            f"{text!r} has a line break or another control character, which no setting of a systemd unit may "
            "have. Remove it from the inventory or from -e."
        )
    return text


def systemd_quote(value: Any, command: bool = False, file: bool = False) -> str:
    """`value` as one word of a setting of systemd that takes several words.

    command: whether it is part of a command, where $ begins a variable. file: whether it is written to a unit
    file, where % begins a specifier. Raises AnsibleFilterError if `value` has a control character, such as a
    line break.
    """
    text = _text(value)
    if not PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    text = text.replace("$", "$$") if command else text
    return text.replace("%", "%%") if file else text


def systemd_line(value: Any) -> str:
    """`value` as a setting of systemd that takes the rest of its line, such as User=.

    Raises AnsibleFilterError if `value` has a control character.
    """
    return _text(value).replace("%", "%%")


def systemd_env(value: Any) -> str:
    """`value` for a line NAME=VALUE in an environment file of systemd.

    Raises AnsibleFilterError if `value` has a control character.
    """
    return '"' + re.sub(r'([\\"$`])', r"\\\1", _text(value)) + '"'


def allowed(addresses: Iterable[Any], tracker_uri: str = "") -> list[str]:
    """The values of systemd's IPAddressAllow= for a run: localhost, the hosts' addresses, the tracker's.

    addresses: IP addresses or names of the hosts; names are resolved. tracker_uri: the address of the
    tracker, "" for none.
    """
    tracker = urlsplit(tracker_uri).hostname if tracker_uri.startswith(("http://", "https://")) else None
    names = [*filter(None, addresses), *([tracker] if tracker else [])]
    found = [address.partition("%")[0] for name in names for address in resolved(str(name))]
    return ["localhost", *dict.fromkeys(address for address in found if not is_loopback(address))]
