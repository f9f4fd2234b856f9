"""The time of a step, its parts, and its distance from the roofline limit of the host."""

DDP = "ddp"  # kind of the benchmark cases with plain DDP; no sync mode of a run
SCHEMA = 4  # version of a result file
WARM_STEPS = 2  # first steps that are not measured: the second one still allocates memory
