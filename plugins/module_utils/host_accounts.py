# SPDX-License-Identifier: MIT
"""Accounts and folders of a host, as facts. Standard library only."""

from __future__ import annotations

import grp
import os
import stat

from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, user_name


def described(name: str) -> dict[str, str] | None:
    """A user as {"comment", "home", "shell"}; None if there is no such user."""
    entry = account(name)
    return entry and {"comment": entry.pw_gecos, "home": entry.pw_dir, "shell": entry.pw_shell}


def folder(path: str) -> dict[str, str] | None:
    """A folder or file as {"owner", "mode"}, such as "root" and "0750"; None if it does not exist.

    A symbolic link is not followed.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return {"owner": user_name(status.st_uid), "mode": f"{stat.S_IMODE(status.st_mode):04o}"}


def groups_of(user: str) -> list[str]:
    """The names of a user's groups, the primary one first; [""] if there is no such user."""
    entry = account(user)
    if entry is None:
        return [""]
    numbers = dict.fromkeys([entry.pw_gid, *os.getgrouplist(user, entry.pw_gid)])
    return [group_name(number) for number in numbers]


def group_name(number: int) -> str:
    """The name of a group; the number as text if it has no name."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
