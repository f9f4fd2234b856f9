"""What a run leaves for people: files in its directory, always, and an MLflow run when there is a server.

    rank 0 writes files (tracker, system)  ->  a process of its own brings them to MLflow (sender, mlflow_run)

The files are complete whatever happens to the server, and the training waits for no network: rank 0 only adds
lines. What the server missed is read from the files and sent when it is back: within the run, by the next
attempt, or after the end by `python -m trainer track --run-dir DIR --tracker-uri URI`.
"""
