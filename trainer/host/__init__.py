"""Facts of this machine: environment of the rank, cores, memory, GPU, arithmetic, logger."""
