# SPDX-License-Identifier: MIT
"""Work on a folder that another user can write to, through file descriptors that follow no link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """A descriptor of a folder. Raises ValueError if `path` is a symbolic link or no folder.

    The folders above it may still contain links; the caller must trust them.
    """
    try:
        return os.open(path, FOLDER)
    except NotADirectoryError:
        raise ValueError(f"{path} is a link or not a folder. Remove it and type the same again.") from None


def entries(folder: int, shown: Path) -> Iterator[tuple[int, str, os.stat_result, Path]]:
    """Every entry below a folder, recursively: (descriptor of its parent, name, lstat, path).

    No symbolic link is followed. shown: path of the folder, from which the paths are made.
    """
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
    """Give a folder, its entries `names` and all below them to uid and gid. Returns the number of changes.

    check: only count. Raises ValueError for a file with several hard links.
    """
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
