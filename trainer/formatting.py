"""Formats tables, durations and counts as text."""

from __future__ import annotations

from typing import Any


def render_table(rows: list[list[Any]]) -> str:
    """A table as text: columns aligned to the left, two blanks before each column, one line per row."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def duration(seconds: float) -> str:
    """Seconds as text in one or two units: 45s, 2m34s, 3h05m, 2d04h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def counted(number: int, noun: str) -> str:
    """A number with its noun in singular or plural: 1 head, 2 heads, 3 micro-batches."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
