"""Tracking of a run: files in its directory and, if there is a server, an MLflow run.

    rank 0 writes files (tracker, system)  ->  a separate process sends them to MLflow (sender, mlflow_run)

Rank 0 only appends lines, so the files are complete even without a server, and training never waits for the
network. The sender reads from the files what the server lacks: during the run, in the next attempt, or after
the end with `python -m trainer track --run-dir DIR --tracker-uri URI`.
"""
