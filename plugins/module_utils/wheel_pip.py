"""Downloads named wheels for another machine with the pip of this Python.

The messages of its errors are sentences for the user.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST_GLIBC = 34  # every supported distribution has glibc 2.34 or newer


def asked_at(index: str) -> list[str]:
    """The line of a requirements file, in a list, with which pip also searches `index`; [] if that is "".

    index: a folder of wheels or the URL of an index.
    """
    if not index:
        return []
    return [f"--find-links {Path(index).resolve()}" if Path(index).is_dir() else f"--extra-index-url {index}"]


def download(wanted: list[str], folder: Path, python_version: str, machine: str, index: str = "") -> None:
    """Download `wanted` (name==version) into a folder, as wheels for CPython on Linux.

    machine: such as x86_64. index: a further index or folder of wheels, "" for none. Raises ValueError if a
    package has no such wheel or pip fails.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(OLDEST_GLIBC, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--implementation", "cp", "--python-version", python_version]
    command += ["--retries", "2", "--timeout", "30", "--disable-pip-version-check", "--no-input"]
    command += [f"--platform={platform}" for platform in platforms]
    # A file and no option: all users of this machine can read command lines, and the URL may hold a password.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join([*asked_at(index), *wanted]) + "\n")
        file.flush()
        command += ["--requirement", file.name]
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode == 0:
        return
    if "No module named pip" in result.stderr:
        raise ValueError(f"{sys.executable} has no pip; on the controller run: make venv")
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
    last = (errors or [result.stderr[-500:]])[-1]
    missing = last.removeprefix("ERROR: No matching distribution found for ")
    if missing != last:
        looked = " and runtime_torch_index" if index else ""
        raise ValueError(
            f"{missing} has no wheel for Python {python_version} on {machine} in pip's indexes{looked}. "
            "Use hosts whose Python has one, or give pip (or runtime_torch_index) an index that holds it; "
            "if there is no network here, copy a wheelhouse that was made elsewhere (docs/how-to/offline.md)."
        )
    raise ValueError(f"pip could not fetch {', '.join(wanted)}: {last.removeprefix('ERROR: ')}")
