"""Export of checkpoints in nanochat's file formats, and import of its checkpoints, tokenizers and shards."""
