"""How long a step takes, of what parts, and how near that is to what the host can do."""

SCHEMA = 3  # of a measurement's file
WARM_STEPS = 2  # of a rehearsal, that do not count: the second one still touches memory for the first time
