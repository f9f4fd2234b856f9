"""The data room: documents -> shards -> packed rows -> the batch of a step. Nothing here imports torch."""


class DataError(ValueError):
    """Something is wrong with the data; the message is a sentence for a person, naming the file or folder."""


class RowsChangedError(DataError):
    """A row is not any more what it was when its file was opened."""
