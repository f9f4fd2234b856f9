"""Converts the tokens of an answer, while they are generated, to text and to the parts of a stored message.

answer = Answer(tokenizer); piece = answer.add([token]); answer.parts
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.tokenizer import Tokenizer

REPLACEMENT = "�"  # the tokenizer decodes an incomplete character to it
MARKS = {  # special token: (type of the part that it begins, text that is shown for it)
    "<|python_start|>": ("python", "`"),
    "<|python_end|>": ("text", "`"),
    "<|output_start|>": ("python_output", " = "),
    "<|output_end|>": ("text", ""),
}


class Answer:
    """An answer of a model while it is generated.

    text: the text to show; a call of the calculator is shown as `EXPRESSION` = RESULT.
    parts: the parts of the message in a conversation, each {"type": "text", "python" or "python_output",
        "text": the text of the part}. The last part is added by `end`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.names = {id: name for name, id in tokenizer.specials.items()}
        self.parts: list[dict[str, str]] = []
        self.text = ""
        self._kind, self._ids, self._shown = "text", list[int](), 0

    def add(self, tokens: Sequence[int]) -> str:
        """Add token ids to the answer; returns the new text.

        Bytes of a character that is not complete yet are kept for the next call.
        """
        before = len(self.text)
        for token in tokens:
            name = self.names.get(token)
            if name is None:
                self._ids.append(token)
                self._show(self.tokenizer.decode(self._ids).rstrip(REPLACEMENT))
            elif name in MARKS:
                self.end()
                self._kind, shown = MARKS[name]
                self.text += shown
        return self.text[before:]

    def end(self) -> str:
        """End the answer; returns the rest of its text: an incomplete character is shown as U+FFFD."""
        before = len(self.text)
        if self._ids:
            text = self.tokenizer.decode(self._ids)
            self._show(text)
            self.parts.append({"type": self._kind, "text": text})
        self._kind, self._ids, self._shown = "text", [], 0
        return self.text[before:]

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self.text += text[self._shown :]
            self._shown = len(text)
