# SPDX-License-Identifier: MIT
"""Makes or removes a run directory, and writes files in it. Standard library only."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text, write_whole

FOLDER_MODE = 0o750
FILE_MODE = 0o640


def prepare_folder(path: str, check: bool) -> bool:
    """Create the folder `path` for a run, or set the mode and group of an existing one.

    Returns whether something was changed, or with `check` would be. Raises ValueError for a symbolic link.
    """
    if os.path.islink(path):
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, and a run's files are written to real folders only. "
            f"Remove the link on this host: {'sudo rm' if os.geteuid() == 0 else 'rm'} {path}"
        )
    found = os.stat(path) if os.path.exists(path) else None
    if found and (stat.S_IMODE(found.st_mode), found.st_gid) == (FOLDER_MODE, os.getegid()):
        return False
    if not check:
        os.makedirs(path, exist_ok=True)
        os.chown(path, -1, os.getegid())
        os.chmod(path, FOLDER_MODE)
    return True


def make(params: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """Make the run directory and its files. Returns {"changed", "changed_files" (names), "diff"}.

    params: options of the module run_directory: path, files ({name: text}), remove (names) and replace.
    check: change nothing. Raises ValueError if the run directory or the folder above it is a link.
    """
    run_dir = params["path"]
    changed = [prepare_folder(path, check) for path in (os.path.dirname(run_dir), run_dir)]
    names, diff = [], []
    for name in params["remove"]:
        if os.path.lexists(path := os.path.join(run_dir, name)):
            names.append(name)
            if not check:
                os.unlink(path)
    for name, text in params["files"].items():
        path = os.path.join(run_dir, name)
        exists = os.path.isfile(path) and not os.path.islink(path)
        before = read_text(path, strip=False) if exists else ""
        if exists and (before == text or not params["replace"]):
            continue
        names.append(name)
        diff.append({"before_header": path, "after_header": path, "before": before, "after": text})
        if not check:
            write_whole(path, text, FILE_MODE)
    return {"changed": any(changed) or bool(names), "changed_files": names, "diff": diff}


def remove(params: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """Remove the run directory; if its path is a link or a file, remove that.

    Returns {"changed", "changed_files"}. params: options of the module run_directory, of which path is used.
    check: change nothing.
    """
    path = params["path"]
    found = os.path.lexists(path)
    if found and not check:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return {"changed": found, "changed_files": []}
