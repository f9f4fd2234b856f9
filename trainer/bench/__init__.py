"""How long a step takes, of what parts, and how near that is to what the host can do."""
