# SPDX-License-Identifier: MIT
"""Work on a folder that another user can write to, through file descriptors that follow no link."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_folder(path: Path) -> int:
    """A descriptor of a folder. Raises ValueError if `path` is a symbolic link or no folder.

    The folders above it may still contain links; the caller must trust them.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise ValueError(f"{path} is a link or not a folder. Remove it and run the playbook again.") from None


def give(folder: int, shown: Path, uid: int, gid: int, names: tuple[str, ...], check: bool = False) -> int:
    """Give a folder, its entries `names` and all below them to uid and gid. Returns the number of changes.

    folder: its descriptor; shown: its path, for messages. No symbolic link is followed. check: only count.
    Raises ValueError for a file with several hard links.
    """
    changed = 0
    if (os.fstat(folder).st_uid, os.fstat(folder).st_gid) != (uid, gid):
        changed += 1
        if not check:
            os.fchown(folder, uid, gid)
    for root, folders, files, parent in os.fwalk(".", dir_fd=folder):
        if root == ".":
            folders[:], files = [n for n in folders if n in names], [n for n in files if n in names]
        for name in folders + files:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if (status.st_uid, status.st_gid) == (uid, gid):
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                path = shown / root / name
                raise ValueError(
                    f"{path} is a hard link of another file. Remove it and run the playbook again."
                )
            changed += 1
            if not check:
                os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
    return changed
