# SPDX-License-Identifier: MIT
"""Lets a process of root access files with the rights of the service user, and looks up accounts.

The service user can replace any file or folder in the state directory by a symbolic link. With that user's
own rights, a link leads only to files that the user may read or write anyway.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator


def account(user: str) -> pwd.struct_passwd | None:
    """The user's entry in the password database; None where there is no such user."""
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """The name of the user with this uid; the uid as text if there is no such user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextlib.contextmanager
def acting_as(user: str) -> Iterator[None]:
    """Context manager: file access in its block has the rights of `user`, if this process is root.

    No effect if `user` is empty, missing or root. Import Ansible's modules before the block: only root can
    read the archive that they come from.
    """
    entry = account(user) if user and os.geteuid() == 0 else None
    if entry is None or entry.pw_uid == 0:
        yield
        return
    gid, groups = os.getegid(), os.getgroups()
    os.setgroups(os.getgrouplist(user, entry.pw_gid))
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)
