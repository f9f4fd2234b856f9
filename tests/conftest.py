"""What holds for all tests."""

# Ansible's module utilities replace sys.intern, and after that torch._dynamo can no longer be imported (torch
# does so when it is first needed): so it comes first, whichever test a worker begins with.
import torch._dynamo  # noqa: F401
