"""The data room: documents -> shards -> packed rows -> the batch of a step. Nothing here imports torch."""


class DataError(ValueError):
    """Something is wrong with the data; the message is a sentence for a person, naming the file or folder."""
