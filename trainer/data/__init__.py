"""Training data: documents -> shards -> packed rows -> the batch of a step. Nothing here imports torch."""


class DataError(ValueError):
    """The data cannot be used. The message is a full sentence that names the file or folder."""


class RowsChangedError(DataError):
    """A row differs from its checksum, which was computed when its file was opened."""
