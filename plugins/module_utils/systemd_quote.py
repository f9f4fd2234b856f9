"""Quotes values for systemd's files and command lines, so that each stays one value (systemd.syntax(7)).

- `systemd_quote`: one word of a setting that takes several words, such as ExecStart= or Environment=. Set
file=true in a unit file, where % begins a specifier, and command=true in a command, where $ begins a
variable.
- `systemd_line`: a setting that takes the rest of its line, such as User=.
- `systemd_env`: the value of a line NAME=VALUE in an environment file.
"""

from __future__ import annotations

import re
from typing import Any

from ansible.errors import AnsibleFilterError

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
    text = _text(value)
    if not PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    text = text.replace("$", "$$") if command else text
    return text.replace("%", "%%") if file else text


def systemd_line(value: Any) -> str:
    return _text(value).replace("%", "%%")


def systemd_env(value: Any) -> str:
    return '"' + re.sub(r'([\\"$`])', r"\\\1", _text(value)) + '"'
