# SPDX-License-Identifier: MIT
"""The secret of the fleet: a file on each host, with which elastic runs sign their messages.

The messages are those about members and elections. Standard library only.
"""

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
    """The secret in the file; "" if the file cannot be read or has no valid secret."""
    text = read_text(path)
    return text if PATTERN.fullmatch(text) else ""


def digest(path: str) -> str:
    """The sha256 of the secret in the file, by which hosts are compared; "" if there is none."""
    secret = read_secret(path)
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


def wanted_access(group: str) -> tuple[str, str]:
    """(group, mode) that the file of the secret must have.

    group: the group of the service user; "" for a file that only its owner may read.
    """
    return (group, "0640") if group else ("", "0600")


def access(path: str, with_group: bool) -> tuple[str, str]:
    """(group, mode) of the file; ("", "") if it is missing, no regular file, or owned by another user.

    with_group: whether the group is read; if not, it is "".
    """
    try:
        status = os.lstat(path)
    except OSError:
        return "", ""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return "", ""
    return group_name(status.st_gid) if with_group else "", f"{stat.S_IMODE(status.st_mode):04o}"


def differences(path: str, group: str) -> list[str]:
    """[a phrase] if the file has no secret, or another group or mode than it must have; else [].

    group: as for `wanted_access`. The phrase does not contain the secret.
    """
    if not read_secret(path) or access(path, bool(group)) != wanted_access(group):
        return ["its secret of the fleet is missing, or another group or mode may read it"]
    return []


def phrases(digests: dict[str, Any], coordinator: str) -> list[str]:
    """A phrase for each host whose secret is not that of the coordinator.

    digests: {host: digest of its secret}. coordinator: the name of that host.
    """
    same = digests[coordinator]
    return [
        f"{host}: its secret is not the coordinator's" for host, found in digests.items() if found != same
    ]
