"""Splits long text into pieces of limited length."""

from collections.abc import Iterator


def split_text(text: str, limit: int) -> Iterator[str]:
    """Yield consecutive pieces of `text`, of at most `limit` characters each.

    A piece ends after a line break if there is one within the limit, preferably one that makes the pieces
    similar in size. Text without line breaks is cut every `limit` characters.
    """
    start = 0
    while len(text) - start > limit:
        rest = len(text) - start
        even = -(-rest // -(-rest // limit))
        cut = text.find("\n", start + even - 1, start + limit) + 1
        cut = cut or text.rfind("\n", start, start + even) + 1
        cut = cut or start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]
