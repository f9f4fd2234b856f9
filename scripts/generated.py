"""Write generated files, or name those that are not current: the main program of the docs_* scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stale(files: dict[Path, str]) -> dict[Path, str]:
    """The entries of `files` (path -> text) whose file is missing or has another text."""
    return {
        path: text
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def update(files: dict[Path, str]) -> None:
    """Write each file (path -> text) and print its path."""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")


def write(name: str, purpose: str, files: dict[Path, str], argv: list[str] | None = None) -> int:
    """Write each file whose text differs; with --check write nothing and return 1 if one differs.

    name: the name of the script without .py. purpose: the docstring of the script. files: {path: text}.
    argv: the arguments without the program; None: those of this process. Returns the exit code.
    """
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=purpose.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name what is not current")
    if not parser.parse_args(argv).check:
        update(stale(files))
        return 0
    outdated = stale(files)
    for path in outdated:
        print(f"{path.relative_to(ROOT)} is not current: python -m scripts.{name}")
    return 1 if outdated else 0
