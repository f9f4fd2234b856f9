"""Finds text for a first training: text that this machine already has, or a folder of the user's own.

Python's standard library is on every machine that runs this. Manuals, documentation and licences are used
where they are installed.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fleet import FleetError

MAX_BYTES = 16_000_000
"""The most text that is used: enough for minutes of training, and tokenized in seconds."""

# Not prose, not code that anyone reads: packages of others, byte code, and CPython's tests.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "lib2to3", "ensurepip", "lib-dynload"}
_SHARED = ("common-licenses", "doc", "man")


def machine_sources(share: Path = Path("/usr/share"), stdlib: Path | None = None) -> list[Path]:
    """Folders and files with English text on this machine, in a fixed order: first those of `stdlib`.

    share: the folder of documentation and manuals. stdlib: by default that of this Python.
    """
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    found = [path for path in sorted(stdlib.iterdir()) if path.name not in _LEFT_OUT and _is_source(path)]
    for name in _SHARED:
        folder = share / name
        if name == "man":  # translations lie beside the sections, in folders named by language
            found += [path for path in sorted(folder.glob("man[0-9]*")) if path.is_dir()]
        elif folder.is_dir():
            found.append(folder)
    return found


def own_sources(folder: str) -> list[Path]:
    """The absolute path of `folder` as the only source. Raises FleetError if it has no readable text."""
    path = Path(folder).expanduser()
    if not path.exists():
        raise FleetError(f"There is no corpus at {path}. Give a folder of text files: make demo CORPUS=dir")
    if not os.access(path, os.R_OK):
        raise FleetError(
            f"The corpus {path} cannot be read by this user. Change its permissions or give another folder."
        )
    if not any(_has_text(file) for file in _files(path)):
        raise FleetError(
            f"The corpus {path} has no text in it. Put .txt, .md or .py files there, "
            "or leave CORPUS away to take text of this machine."
        )
    return [path.resolve()]


def _is_source(path: Path) -> bool:
    return path.suffix in (".py", ".txt") if path.is_file() else path.is_dir()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _has_text(path: Path) -> bool:
    """Whether the first 4 KiB of a file look like text: not blank, without NUL bytes.

    Any non-empty .gz or .parquet file counts: the trainer checks it.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return (path.suffix in (".gz", ".parquet") and bool(head)) or (bool(head.strip()) and b"\0" not in head)
