"""Checkpoints: format and storage, background writer, copies on other hosts, state of single ranks."""
