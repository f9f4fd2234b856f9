"""Formats numbers, and draws a loss curve with braille characters."""

from collections.abc import Sequence

import numpy as np

Point = tuple[int, float]
"""(step, loss)."""

# Braille cells hold 2 x 4 dots; the bit of each dot, by row and column within a cell.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def number(value: float | None, digits: int = 0) -> str:
    """A number with commas between thousands and `digits` decimals; ``-`` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def curve(points: Sequence[Point], width: int = 60, height: int = 8) -> list[str]:
    """Draw a loss curve in braille dots, with its scale at the left and its steps below.

    points: (step, loss), in the order of steps. width, height: in characters. Returns ``height + 2`` lines of
    text; [] for fewer than two points.
    """
    if len(points) < 2:
        return []
    columns, rows = width * 2, height * 4
    steps, losses = zip(*points, strict=True)
    first, last, low, high = steps[0], steps[-1], min(losses), max(losses)
    shown = np.interp(np.linspace(first, last, columns), steps, losses)
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column, loss in enumerate(shown.tolist()):
        row = round((high - loss) / ((high - low) or 1.0) * (rows - 1))
        # Joins steep stretches, so that the curve has no holes.
        start = row if previous is None else previous + (row > previous) - (row < previous)
        for filled in range(min(start, row), max(start, row) + 1):
            cells[filled // 4][column // 2] |= _DOTS[filled % 4][column % 2]
        previous = row
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    left = max(len(label) for label in labels.values())
    lines = [
        f"{labels.get(index, ''):>{left}} ┤" + "".join(chr(0x2800 + cell) if cell else " " for cell in row)
        for index, row in enumerate(cells)
    ]
    lines.append(" " * left + " └" + "─" * width)
    end = f"step {last}"
    lines.append(" " * (left + 2) + f"{first:<{max(1, width - len(end))}}{end}")
    return lines
