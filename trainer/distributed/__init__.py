"""Process group, rendezvous, and the checks that all ranks train the same run."""
