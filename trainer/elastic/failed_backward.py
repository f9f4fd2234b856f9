"""Frees what torch keeps of a backward pass that ended with an exception, as when a rank is lost in it.

torch's autograd engine has a queue of the nodes that are ready. An exception leaves them there, and with them
the rest of the graph: activations, parameters, and through their hooks model and optimizer. The next backward
pass of the same thread removes them.
"""

from __future__ import annotations

import torch


def free() -> None:
    """Remove the nodes of failed backward passes of this thread. Call it on the thread that trains."""
    torch.zeros((), requires_grad=True).mul(1).backward()
