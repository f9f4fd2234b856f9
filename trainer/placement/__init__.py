"""Measures the ranks before step 0, and chooses sync mode, batch split, or one faster host for the run."""
