"""nanofleet's trainer: one rank of a data-parallel training run of a nanochat model.

The trainer does not need the playbooks: it also runs under a plain `torchrun -m trainer train ...`, or as one
process with `python -m trainer train ...`.
"""

__version__ = "0.1.0"
