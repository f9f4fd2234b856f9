"""Sync mode, batch split and single faster host: measured, predicted, decided before step 0."""
