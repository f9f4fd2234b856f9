"""The sha256 of files, stored with their size, mtime and ctime, so that an unchanged file is read once.

Writing to a file always changes its ctime, even if the mtime is set back. Not detected are errors below the
file system: a disk that returns other bytes than were written.
"""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json, sha256_of, write_whole


class Digests:
    """The sha256 of files, stored in the JSON file `path` as {name: [size, mtime, ctime, sha256]}.

    Size is in bytes, both times are in ns. The attribute `hashed` counts the files that had to be read,
    because they were new or changed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.hashed = path, 0
        self.known: dict[str, list[Any]] = load_json(str(self.path)) or {}
        self.kept: dict[str, list[Any]] = {}

    def sha256(self, name: str, path: Path) -> str:
        """The sha256 of the file `path`, which is read only if it is new or has changed.

        name: the key of the file in the JSON file. Raises OSError if the file cannot be read.
        """
        status = path.stat()
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = self.known.get(name)
        if not (isinstance(entry, list) and entry[:3] == key and len(entry) == 4):
            entry = [*key, sha256_of(path)]
            self.hashed += 1
        self.kept[name] = entry
        return str(entry[3])

    def save(self) -> None:
        """Write the JSON file, with the files for which `sha256` was called.

        If the user may not write the JSON file, or the file system is read-only, nothing happens.
        """
        if self.kept == self.known:
            return
        # Without the file the next comparison only takes longer.
        try:
            write_whole(str(self.path), json.dumps(self.kept))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise


def folder_digest(folder: Path) -> dict[str, Any]:
    """Digest and size of a folder with all that is in it, as {"found", "sha256", "files", "bytes"}.

    found: whether the folder exists. sha256: digest of the names and contents of all files, "" if the folder
    does not exist. files: the number of files. bytes: the size of all files together. Raises ValueError if
    there is a symbolic link in the folder.
    """
    result: dict[str, Any] = {"found": folder.is_dir(), "sha256": "", "files": 0, "bytes": 0}
    if not result["found"]:
        return result
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link. Replace it by the file, and repeat the command")
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            whole.update(path.relative_to(folder).as_posix().encode() + b"\0" + content)
            result["files"] += 1
            result["bytes"] += path.stat().st_size
    return {**result, "sha256": whole.hexdigest()}
