"""Manual pages as plain text, rendered by `mandoc` (https://mandoc.bsd.lv)."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

RENDER_SECONDS = 30.0
# .../man1/ls.1.gz, .../de/man7/x.7
_PATH = re.compile(r"/man[1-9n]\w*/[^/]+\.[1-9n]\w*(\.gz)?$")
_FIRST_MACRO = re.compile(r"^\.(TH|Dd)\b", re.MULTILINE)
_OVERSTRIKE = re.compile(".\b")  # bold and underlined text, as terminals print it


def is_manual_path(path: Path) -> bool:
    """Whether `path` is that of a manual page: a file such as ls.1.gz in a man folder."""
    return _PATH.search(path.as_posix()) is not None


def is_manual(path: Path, text: str) -> bool:
    """Whether a file is a manual page: `path` is in a man folder, and `text` has the macro .TH or .Dd."""
    return is_manual_path(path) and _FIRST_MACRO.search(text) is not None


@functools.cache
def find_mandoc() -> str | None:
    """The path of the program mandoc; None if it is not on PATH."""
    return shutil.which("mandoc")


def render_manual(mandoc: str, page: str) -> str:
    """Render `page`, the source of a manual page, as plain text with the program at the path `mandoc`.

    Bold and underlined text becomes plain. Raises OSError if mandoc prints nothing or takes more than
    RENDER_SECONDS.
    """
    command = [mandoc, "-T", "utf8", "-I", "os="]  # else an mdoc page names the system it is rendered on
    try:
        done = subprocess.run(
            command, input=page.encode(), capture_output=True, timeout=RENDER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"mandoc took more than {RENDER_SECONDS:.0f} s") from error
    text = _OVERSTRIKE.sub("", done.stdout.decode("utf-8", "replace"))
    if not text.strip():
        raise OSError(f"mandoc printed nothing (exit code {done.returncode})")
    return text
