"""Muon and AdamW, and the schedules of learning rates, Muon's momentum and Muon's weight decay."""
