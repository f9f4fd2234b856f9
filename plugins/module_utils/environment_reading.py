# SPDX-License-Identifier: MIT
"""Reads the versions in a Python environment, by starting its Python. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

PROGRAM = """
import importlib.metadata, json, os, platform, sys
try:
    try:
        from trainer.code_digest import code_digest
    except ImportError:  # a release up to 0.1
        from trainer.config import code_digest
    found = {"torch": importlib.metadata.version("torch"), "trainer": code_digest()}
except ImportError as error:
    sys.exit(f"The environment {sys.prefix} is not complete: {error}. Fix: ansible-playbook setup.yml")
name = os.path.basename(os.path.realpath(sys.prefix))
about = {"environment": name, "machine": platform.machine(), "python": platform.python_version()}
print(json.dumps({**about, **found}))
"""


def read_environment(python: str) -> dict[str, Any]:
    """The versions in a Python environment and the number of processors, as {"installed", "cores"}.

    python: the path of the Python in the environment. Keys of the result:
    installed: dict with environment (name of its folder), machine (architecture, such as x86_64), python and
    torch (versions) and trainer (digest of its code); {} if `python` does not exist. cores: number of
    processors that this process may use. Raises ValueError if the Python does not run, or if torch or the
    trainer is missing.
    """
    cores = len(os.sched_getaffinity(0))
    if not os.path.exists(python):
        return {"installed": {}, "cores": cores}
    done = subprocess.run([python, "-I", "-c", PROGRAM], capture_output=True, text=True, check=False)
    if done.returncode:
        silent = (
            f"{python} does not start (exit status {done.returncode}): the environment is damaged. "
            "Fix: ansible-playbook setup.yml"
        )
        raise ValueError((done.stderr.strip().splitlines() or [silent])[-1])
    return {"installed": json.loads(done.stdout), "cores": cores}
