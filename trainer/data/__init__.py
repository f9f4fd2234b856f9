"""Training data: documents -> shards -> packed rows -> the batch of a step. Nothing here imports torch."""

VOCAB_SIZE = 32_768  # of a tokenizer that is trained, unless another size is asked for
SHARD_BYTES = 100_000_000  # text in a shard, about
SEED = 42  # of the order of the documents
# The data sets of nanochat (nanochat/dataset.py): URL and number of the last shard, which is for validation.
PUBLIC = {
    "climbmix": ("https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542),
    "fineweb-edu": ("https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822),
}


class DataError(ValueError):
    """Raised if training data cannot be used. The message is a sentence that names the file or folder."""


class RowsChangedError(DataError):
    """Raised if the bytes of a packed row differ from the CRC-32 computed when its file was opened."""
