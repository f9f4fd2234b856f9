"""Write requirements/hashes.txt: the sha256 of every file of each package that constraints.txt pins.

    make lock                                       after constraints.txt has changed
    TORCH_INDEX_URL=FOLDER_OR_URL make lock         where torch's CPU build comes from elsewhere

uv reads the hashes from the configured package index and downloads nothing if the index publishes them. Only
PyTorch's own index has the CPU build of torch: its hashes, for each Python and machine with a wheel, come
from TORCH_INDEX_URL, else from the folder PIP_FIND_LINKS, else from PyTorch's index. Builds without a hash
are printed and listed in the file; setup.yml trusts their first download, with a warning.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "requirements" / "hashes.txt"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEADER = """\
# Written by: make lock
# The sha256 of every file of each version in constraints.txt, as the package index lists them; a wheelhouse
# takes no other file. torch==VERSION is the CUDA build; torch==VERSION+cpu the CPU build, one entry for each
# Python and machine, from an index or of a wheel that was at hand.
"""


class LockError(Exception):
    """Raised if the hashes cannot be locked. The message is a sentence for the user."""


def compile_hashes(requirements: str, *options: str, **environment: str) -> str:
    """Run `uv pip compile` on requirement lines, without dependencies; returns them with their hashes.

    options: more options of uv; environment: more variables for it. Raises LockError.
    """
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "-",
        "--quiet",
        "--no-deps",
        "--generate-hashes",
        "--no-header",
    ]
    command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", *options]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, input=requirements, capture_output=True, text=True, env=merged)
    if "No module named uv" in done.stderr:
        raise LockError("uv is missing. Fix: make venv")
    if done.returncode != 0:
        raise LockError(" ".join(done.stderr.split()) or f"uv ended with status {done.returncode}.")
    return done.stdout


def torch_hashes(version: str, index: str, python: str, machine: str) -> list[str]:
    """The sha256 of each wheel of torch's CPU build for one Python and machine; [] if there is none.

    index: a folder with wheels, or the URL of an index.
    """
    if Path(index).is_dir():
        name = f"torch-{version}+cpu-cp{python.replace('.', '')}-*_{machine}.whl"
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(index).glob(name))]
    kind = ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_34"]
    try:
        text = compile_hashes(f"torch=={version}+cpu\n", *kind, UV_INDEX=index)
    except LockError:
        return []
    return re.findall(r"--hash=sha256:([0-9a-f]{64})", text)


def torch_builds(version: str, index: str) -> tuple[str, list[str]]:
    """Returns (lines of hashes.txt for torch's CPU build, each Python and machine that has no wheel)."""
    entries, missing = "", []
    for machine in MACHINES:
        for python in PYTHONS:
            hashes = torch_hashes(version, index, python, machine)
            if not hashes:
                missing.append(f"Python {python} on {machine}")
                continue
            marker = f'python_version == "{python}" and platform_machine == "{machine}"'
            lines = [f"torch=={version}+cpu ; {marker}", *(f"    --hash=sha256:{each}" for each in hashes)]
            entries += " \\\n".join(lines) + "\n"
    return entries, missing


def torch_index() -> str:
    return os.environ.get("TORCH_INDEX_URL") or os.environ.get("PIP_FIND_LINKS") or CPU_INDEX


def main() -> int:
    pins = CONSTRAINTS.read_text(encoding="utf-8")
    torch = re.search(r"(?m)^torch==(\S+)$", pins)
    if torch is None:
        raise LockError(f"{CONSTRAINTS} pins no torch. Write it again as its first lines describe.")
    locked = compile_hashes(pins, "--universal", "--python-version", PYTHONS[0])
    entries, missing = torch_builds(torch[1], torch_index())
    note = f"# No hash of torch=={torch[1]}+cpu is known for:\n" if missing else ""
    note += "".join(f"#   {kind}\n" for kind in missing)
    HASHES.parent.mkdir(exist_ok=True)
    partial = HASHES.with_name(f"{HASHES.name}.partial")
    partial.write_text(HEADER + note + locked + entries, encoding="utf-8")
    partial.replace(HASHES)
    print(f"{HASHES.relative_to(ROOT)}: {len(set(re.findall(r'(?m)^[a-z0-9.-]+==', locked)))} packages")
    if missing:
        print(f"No hash of torch's CPU build for {', '.join(missing)}: setup.yml trusts the first download.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LockError as error:
        sys.exit(f"lock: {error}")
