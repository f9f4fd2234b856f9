"""Checkpoints: format and storage, background writer, per-rank state."""
