"""Frees the memory that torch keeps after a backward pass has raised an exception, as when a rank is lost.

torch's autograd engine has a queue of the nodes that are ready. An exception leaves these nodes in the queue.
They refer to the rest of the graph: activations, parameters and, through hooks of the parameters, the model
and the optimizer. The next backward pass of the same thread removes the nodes.
"""

from __future__ import annotations

import torch


def free() -> None:
    """Remove the nodes of failed backward passes of this thread. Call it on the thread that trains."""
    torch.zeros((), requires_grad=True).mul(1).backward()
