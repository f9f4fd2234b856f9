"""Training data: documents -> shards -> packed rows -> the batch of a step. Nothing here imports torch."""


class DataError(ValueError):
    """Raised if training data cannot be used. The message is a sentence that names the file or folder."""


class RowsChangedError(DataError):
    """Raised if the bytes of a packed row differ from the CRC-32 computed when its file was opened."""
