"""The console: the repository's playbooks run through ansible-runner, with live progress in a terminal.

Run it as ``python -m fleet {demo,train,watch}``. It runs the very playbooks a person runs by hand and
knows no more about a run than they report; closing it never ends a training.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root, where the playbooks and ansible.cfg stand."""

CACHE = ROOT / ".cache"
"""Logs and the demo's data; git does not see it."""


class FleetError(Exception):
    """An error that a person can fix. Its message names the problem, the place and the next command."""
