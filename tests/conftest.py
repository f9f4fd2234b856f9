"""What holds for all tests, and fixtures of several modules; those with a lab share one a session."""

import os

# Workers of pytest -n share the processors: with a thread for each processor, they wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ansible's module utilities replace sys.intern, and after that torch._dynamo can no longer be imported (torch
# does so when it is first needed): so it comes first, whichever test a worker begins with.
import torch._dynamo  # noqa: F401  isort: skip

from pathlib import Path

from ansible.plugins.loader import init_plugin_loader

# As in ansible-playbook, Ansible's own loader imports the collection, for filters in templates.
init_plugin_loader([str(Path(__file__).resolve().parents[1] / ".ansible" / "collections")])

# Fixtures of several modules. They import the collection, so they come after its loader.
from e2e.lab import dataset as dataset  # noqa: E402
from e2e.lab import fleet as fleet  # noqa: E402
from fake_systemd import systemd as systemd  # noqa: E402
from wheels import house as house  # noqa: E402
