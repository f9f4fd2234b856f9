"""Measures the time of a step and of its parts, and compares it with the roofline limit of the host."""

DDP = "ddp"  # kind of the benchmark cases with plain DDP; no sync mode of a run
SCHEMA = 4  # version of a result file
WARM_STEPS = 2  # first steps that are not measured: the second one still allocates memory
