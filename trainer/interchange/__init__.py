"""Checkpoints, tokenizers and data directories to and from upstream nanochat, as its own files."""
