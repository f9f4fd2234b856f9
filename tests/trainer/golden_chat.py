"""The figures of golden_chat.json, and the tokenizer that they were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.data.tokenizer import Tokenizer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_chat.json").read_text(encoding="utf-8"))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer without merges: 256 bytes, then nine special tokens."""
    return Tokenizer([bytes([byte]) for byte in range(256)])
