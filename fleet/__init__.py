"""The console: the repository's playbooks run through ansible-runner, with live progress in a terminal.

Run it as ``python -m fleet {demo,train,watch}``. The console runs the same playbooks that a person runs by
hand and shows only what the playbooks report. Closing the console never ends a training run.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The root of the repository, which has the playbooks and ansible.cfg."""

CACHE = ROOT / ".cache"
"""The folder of the console's logs and the demo's data; git ignores it."""


class FleetError(Exception):
    """Raised for an error that a person can fix. The message has the problem and the remedy."""
