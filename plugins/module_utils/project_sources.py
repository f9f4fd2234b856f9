"""A digest of all that the project's wheel is built from. Used on the controller only."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def sources_digest(source: Path) -> str:
    """The sha256 of all that the project's wheel is built from, as hex digits.

    source: the folder of the project. Included are the versions of Python and hatchling, the files in the
    folder itself, and the files of the packages in the wheel. Two equal digests mean equal wheels, because
    the wheel is built with fixed times.
    """
    digest = hashlib.sha256(f"{sys.version}\n{_hatchling()}\n".encode())
    for path in sorted(_files(source)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(source)} {path.stat().st_mode & 0o111:o} {content}\n".encode())
    return digest.hexdigest()


def _hatchling() -> str:
    try:
        return importlib.metadata.version("hatchling")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _files(source: Path) -> Iterator[Path]:
    """Yield the files in the folder `source` itself and all files of its packages.

    The packages are those of the wheel in pyproject.toml; if none are listed there, every folder.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    build = project.get("tool", {}).get("hatch", {}).get("build", {})
    packages = build.get("targets", {}).get("wheel", {}).get("packages")
    folders = [source / name for name in packages] if packages else _folders(source)
    yield from (path for path in source.iterdir() if path.is_file())
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _folders(source: Path) -> list[Path]:
    return [path for path in source.iterdir() if path.is_dir() and not path.name.startswith(".")]
