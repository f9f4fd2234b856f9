"""Bits per byte, CORE, answers to questions, and text sampled from a model: during a run and by `eval`."""
