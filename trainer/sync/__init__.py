"""Sync modes: how gradients or parameters are reduced over the ranks."""
