"""Finds text for a first training: text that this machine already has, or a folder that a person names.

Text of this machine is the source of Python's standard library, which every machine has, and the manuals,
documentation and licences that are installed.
"""

import sysconfig
from pathlib import Path

from fleet import FleetError
from trainer.data import DataError
from trainer.data.sources import SkippedFileError, SourceFile, documents, find_files

MAX_BYTES = 16_000_000
"""The most text that is used: enough for minutes of training, and tokenized in seconds."""

# Third-party packages, byte code and CPython's tests are not used as text.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "lib2to3", "ensurepip", "lib-dynload"}
_SHARED = ("common-licenses", "doc", "man")


def machine_sources(share: Path = Path("/usr/share"), stdlib: Path | None = None) -> list[Path]:
    """Folders and files with English text on this machine, in a fixed order.

    share: the folder of documentation and manuals, such as /usr/share. stdlib: the folder of Python's
    standard library, whose files come first; None: the folder of this Python.
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
    """The absolute path of `folder`, in a list. Raises FleetError if the folder has no readable text."""
    path = Path(folder).expanduser()
    try:
        files, _skipped = find_files([path])
    except DataError as error:
        raise FleetError(
            f"The corpus cannot be used. {error} Give a folder of text: make demo CORPUS=dir"
        ) from None
    if not any(_has_text(file) for file in files):
        raise FleetError(
            f"The corpus {path} has no text in it. Put .txt, .md or .py files there, "
            "or leave out CORPUS to use text of this machine."
        )
    return [path.resolve()]


def _is_source(path: Path) -> bool:
    return path.suffix in (".py", ".txt") if path.is_file() else path.is_dir()


def _has_text(file: SourceFile) -> bool:
    try:
        return any(text.strip() for text in documents(file, 4096))
    except (SkippedFileError, DataError):
        return False
