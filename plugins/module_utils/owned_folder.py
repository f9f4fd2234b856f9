# SPDX-License-Identifier: MIT
"""Work on a folder that another user may write to, by descriptors that follow no link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """A descriptor of a folder that is no symbolic link; its parents are the caller's to trust."""
    try:
        return os.open(path, FOLDER)
    except NotADirectoryError:
        raise ValueError(f"{path} is a link or no folder. Remove it and type the same again.") from None


def entries(folder: int, shown: Path) -> Iterator[tuple[int, str, os.stat_result, Path]]:
    """What is in a folder at any depth: descriptor of its folder, name, status and path. Follows no link."""
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        yield folder, name, status, shown / name
        if stat.S_ISDIR(status.st_mode):
            inner = os.open(name, FOLDER, dir_fd=folder)
            try:
                yield from entries(inner, shown / name)
            finally:
                os.close(inner)


def give(folder: int, shown: Path, uid: int, gid: int, names: tuple[str, ...], check: bool = False) -> int:
    """Make a folder and its `names`, with all below them, a user's. Returns how many belonged to another."""
    changed = 0
    if (os.fstat(folder).st_uid, os.fstat(folder).st_gid) != (uid, gid):
        changed += 1
        if not check:
            os.fchown(folder, uid, gid)
    for parent, name, status, path in entries(folder, shown):
        if path.relative_to(shown).parts[0] not in names or (status.st_uid, status.st_gid) == (uid, gid):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise ValueError(f"{path} is a hard link of another file. Remove it and type the same again.")
        changed += 1
        if not check:
            os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
    return changed
