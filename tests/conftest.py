"""What holds for all tests, and fixtures of several modules; those with a lab share one a session."""

# Ansible's module utilities replace sys.intern, and after that torch._dynamo can no longer be imported (torch
# does so when it is first needed): so it comes first, whichever test a worker begins with.
import torch._dynamo  # noqa: F401  isort: skip

from e2e.lab import dataset as dataset
from e2e.lab import fleet as fleet
from wheels import house as house
