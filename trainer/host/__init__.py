"""The host of a rank: environment, cores, memory, GPU, number formats, network interface, logger."""
