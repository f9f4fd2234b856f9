"""Sets the owner of a data directory: the login user during rsync, else the service user.

The service user can replace an entry of the directory by a symbolic link. root therefore works on file
descriptors and follows no link. Entries other than those in PUSHED keep their owner.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Any

PUSHED = ("manifest.json", "shards", "tokenizer", "core")


def give(folder: int, shown: Path, uid: int, gid: int, names: tuple[str, ...], check: bool = False) -> int:
    """Set the owner and group of a folder, of some of its entries and of everything below these entries.

    Returns the number of files and folders whose owner or group changes. folder: file descriptor of the open
    folder. shown: path of the folder, for messages. uid, gid: the numbers of the owner and the group. names:
    the names of the entries. check: whether the changes are only counted. No symbolic link is followed.
    Raises ValueError if a file to change has several hard links.
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


def own(path: Path, user: str, reader: str, mode: int, check: bool) -> dict[str, Any]:
    """Make a data directory and set its owner and mode.

    Returns {"changed": whether anything changes, "given": the result of `give`}. path: the path of the
    directory. user: the owner. reader: the user whose primary group the directory and the files get. mode:
    the permission bits of the directory itself. check: whether to change nothing. Raises ValueError if a
    user is missing (not with `check`), if `path` is a link or no folder, or if a file has several hard links.
    """
    try:
        uid, gid = pwd.getpwnam(user).pw_uid, pwd.getpwnam(reader).pw_gid
    except KeyError as missing:
        if check:  # a dry run before the first setup
            return {"changed": True, "given": 0}
        raise ValueError(
            f"The owner of {path} cannot be set ({missing.args[0]}). Fix: ansible-playbook setup.yml"
        ) from None
    made = not os.path.lexists(path)
    if made and check:
        return {"changed": True, "given": 0}
    if made:
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise ValueError(f"{path} is a link or not a folder. Remove it and run the playbook again.") from None
    try:
        given = give(folder, path, uid, gid, PUSHED, check)
        moded = stat.S_IMODE(os.fstat(folder).st_mode) != mode
        if moded and not check:
            os.fchmod(folder, mode)
    finally:
        os.close(folder)
    return {"changed": bool(made or given or moded), "given": given}
