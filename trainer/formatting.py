"""Formats tables, durations and counts as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def render_table(rows: list[list[Any]]) -> str:
    """A table as text: columns aligned to the left, two blanks before each column, one line per row."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def markdown_table(rows: Sequence[Sequence[str]], aligned: bool = True) -> str:
    """A Markdown table; the first row is its head. aligned: whether cells are padded to equal widths."""
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * max(3, width + 2) for width in widths) + "|")
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """Seconds as text: 46 ms, 1.8 s, 2m34s, 3h05m, 2d04h; - for None, nan and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if 0 < seconds < 0.095:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def counted(number: int, noun: str) -> str:
    """A number with its noun in singular or plural: 1 head, 2 heads, 3 micro-batches, 4 processes."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s")
