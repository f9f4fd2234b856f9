"""Muon and AdamW, and the schedules of their learning rates."""
