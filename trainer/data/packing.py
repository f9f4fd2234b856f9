"""Best-fit packing: documents -> full rows, and conversations -> padded rows.

A row of documents starts with <|bos|> and is full. The remaining room of the row takes the longest document
that fits; if none fits, the shortest document is cut. The rest of a cut document becomes a document of its
own, so no token is lost except those of the last row, if that row cannot be filled.

The remaining room of a row of conversations takes the longest conversation that fits; if none fits, the rest
of the row is padded. Packing never cuts a conversation, so no token is lost.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFER_DOCUMENTS = 1000
BUFFER_TOKENS = 2**24
BUFFER_CONVERSATIONS = 100  # as in nanochat (scripts/chat_sft.py)


class Buffer:
    """Documents (arrays of token ids) that are not in a row yet, ordered by length and then by arrival."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.documents: dict[int, NDArray[Any]] = {}
        self.arrivals = 0
        self.tokens = 0

    def add(self, document: NDArray[Any]) -> None:
        """Add a document, an array of token ids."""
        self.arrivals += 1
        insort(self.order, (len(document), self.arrivals))
        self.documents[self.arrivals] = document
        self.tokens += len(document)

    def best_fit(self, room: int) -> NDArray[Any]:
        """Remove and return the longest document of at most `room` tokens; if none fits, the shortest."""
        position = max(0, bisect_left(self.order, (room + 1, 0)) - 1)
        length, arrival = self.order.pop(position)
        self.tokens -= length
        return self.documents.pop(arrival)

    def longest_fit(self, room: int) -> NDArray[Any] | None:
        """Remove and return the longest document of at most `room` tokens.

        Of equally long documents, the first to arrive is taken. Returns None if no document fits.
        """
        position = bisect_left(self.order, (room + 1, 0)) - 1
        if position < 0:
            return None
        length, arrival = self.order.pop(bisect_left(self.order, (self.order[position][0], 0)))
        self.tokens -= length
        return self.documents.pop(arrival)

    @property
    def full(self) -> bool:
        """Whether the buffer holds at least BUFFER_DOCUMENTS documents or BUFFER_TOKENS tokens."""
        return len(self.order) >= BUFFER_DOCUMENTS or self.tokens >= BUFFER_TOKENS


def fill_rows(documents: Iterator[NDArray[Any]], row_tokens: int, bos_id: int) -> Iterator[NDArray[Any]]:
    """Pack `documents`, arrays of token ids that start with `bos_id`, into rows of `row_tokens` tokens.

    The tokens of a last row that cannot be filled are dropped. Modifies the documents: where a document is
    cut, `bos_id` overwrites the last token that is already in the row, so that the rest starts with `bos_id`
    too.
    """
    buffer = Buffer()
    exhausted = False
    while True:
        row = np.empty(0)
        filled = 0
        while filled < row_tokens:
            while not exhausted and not buffer.full:
                document = next(documents, None)
                if document is None:
                    exhausted = True
                else:
                    buffer.add(document)
            if not buffer.order:
                return
            room = row_tokens - filled
            document = buffer.best_fit(room)
            if not filled:
                row = np.empty(row_tokens, dtype=document.dtype)
            part = document[:room]
            row[filled : filled + len(part)] = part
            filled += len(part)
            if len(document) > room:
                document[room - 1] = bos_id
                buffer.add(document[room - 1 :])
        yield row


def fill_padded_rows(
    conversations: Iterator[NDArray[Any]], row_tokens: int, padding: int
) -> Iterator[NDArray[Any]]:
    """Pack `conversations`, arrays of at most `row_tokens` tokens, into rows of `row_tokens` tokens.

    No conversation is cut. The remaining room of a row takes the longest conversation that fits, out of a
    buffer of BUFFER_CONVERSATIONS conversations. If no conversation in the buffer fits, the room is filled
    with the token id `padding`.
    """
    buffer = Buffer()
    exhausted = False
    while True:
        row = np.empty(0)
        filled = 0
        while filled < row_tokens:
            while not exhausted and len(buffer.order) < BUFFER_CONVERSATIONS:
                conversation = next(conversations, None)
                if conversation is None:
                    exhausted = True
                else:
                    buffer.add(conversation)
            conversation = buffer.longest_fit(row_tokens - filled)
            if conversation is None:
                break
            if not filled:
                row = np.full(row_tokens, padding, dtype=conversation.dtype)
            row[filled : filled + len(conversation)] = conversation
            filled += len(conversation)
        if not filled:
            return
        yield row
