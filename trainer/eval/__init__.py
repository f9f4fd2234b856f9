"""Bits per byte on validation rows, and text sampled from a model."""
