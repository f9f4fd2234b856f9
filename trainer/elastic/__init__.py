"""Elastic training: a run continues without a restart when a host leaves it or joins it."""
