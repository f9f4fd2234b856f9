# SPDX-License-Identifier: MIT
"""The secret of the fleet, a file on each host, which elastic runs sign with. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.host_accounts import group_name

PATTERN = re.compile("[0-9a-f]{64}")


def read_secret(path: str) -> str:
    """The secret in the file; "" if there is none."""
    text = read_text(path)
    return text if PATTERN.fullmatch(text) else ""


def digest(path: str) -> str:
    """The sha256 of the secret in the file, by which hosts are compared; "" if there is none."""
    secret = read_secret(path)
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


def wanted_access(group: str) -> tuple[str, str]:
    """(group, mode) that the file has to have. group: that of the service user; "": the user's own file."""
    return (group, "0640") if group else ("", "0600")


def access(path: str, with_group: bool) -> tuple[str, str]:
    """(group, mode) of the file, ("", "") if it is missing or a link. Without with_group the group is ""."""
    try:
        status = os.lstat(path)
    except OSError:
        return "", ""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return "", ""
    return group_name(status.st_gid) if with_group else "", f"{stat.S_IMODE(status.st_mode):04o}"


def differences(path: str, group: str) -> list[str]:
    """A phrase if the file is missing, or others may read it. The phrase does not have the secret."""
    if not read_secret(path) or access(path, bool(group)) != wanted_access(group):
        return ["its secret of the fleet is missing, or another group or mode may read it"]
    return []


def phrases(digests: dict[str, Any], coordinator: str) -> list[str]:
    """A phrase for each host whose secret is not that of the coordinator. digests: by host."""
    same = digests[coordinator]
    return [
        f"{host}: its secret is not the coordinator's" for host, found in digests.items() if found != same
    ]
