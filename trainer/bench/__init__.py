"""The time of a step, its parts, and its distance from the roofline limit of the host."""

SCHEMA = 3  # version of a result file
WARM_STEPS = 2  # steps that do not count: the second one still allocates memory
