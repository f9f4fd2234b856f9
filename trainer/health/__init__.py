"""Run status, diagnosis of ranks that delay or stop a run, and the restart policy."""
