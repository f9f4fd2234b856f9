"""Frees what torch keeps of a backward pass that ended with an exception, as when a rank is lost in it.

torch's autograd engine has a queue of the nodes that are ready. An exception leaves them there, and with them
the rest of the graph: activations, parameters, and through their hooks model and optimizer. A later backward
pass removes a node from the queue only when it reaches nodes that are older.
"""

from __future__ import annotations

import torch

# The oldest node of the thread that imports this module, which is the one that trains.
_LEAF = torch.zeros((), requires_grad=True)
_OLDEST = _LEAF * 1


def free() -> None:
    """Remove the nodes of failed backward passes of this thread. Call it on the thread that trains."""
    torch.autograd.grad(_OLDEST, _LEAF, retain_graph=True)
