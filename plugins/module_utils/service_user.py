# SPDX-License-Identifier: MIT
"""The rights of the service user, for file work that root does for it.

Below the state directory the service user can put a link in the place of any file or folder. With that user's
own rights such a link leads only to files that it may read or write anyway.
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
    """A user's name; the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextlib.contextmanager
def acting_as(user: str) -> Iterator[None]:
    """Do the file work of the `with` block with the rights of `user`, if this process is root.

    An empty name or that of a missing user changes nothing. Ansible's modules must be imported before: only
    root reads the archive they come from.
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
