"""Draw the pictures of the documentation: docs/assets/*.svg.

    python -m scripts.docs_diagrams             # write the pictures
    python -m scripts.docs_diagrams --check     # write nothing, name the pictures that are not current

Each picture has its own light background, so that it is readable on light and dark pages. It loads no font.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from scripts.generated import ROOT, write

ASSETS = ROOT / "docs" / "assets"
INK, EDGE, MUTED = "#1e293b", "#64748b", "#475569"
WHITE, GREY, BLUE, GREEN, AMBER, RED = "#ffffff", "#eef2f7", "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2"


class Picture:
    """An SVG picture made of boxes, arrows and texts. Coordinates are in pixels from the upper left."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def box(
        self, x: int, y: int, w: int, h: int, lines: list[str], fill: str = WHITE, top: bool = False
    ) -> None:
        """Add a box with lines of text, the first bold. top: they start at the upper edge, else centred."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{EDGE}"/>'
        )
        start = y + 20 if top else y + h / 2 - 8.5 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + w / 2, start + 17 * number, line, bold=number == 0)

    def text(
        self, x: float, y: float, text: str, bold: bool = False, anchor: str = "middle", muted: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        color = MUTED if muted else INK
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int, both: bool = False, dashed: bool = False) -> None:
        more = ' marker-start="url(#tip)"' if both else ""
        more += ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{EDGE}" stroke-width="1.5"'
            f' marker-end="url(#tip)"{more}/>'
        )

    def svg(self) -> str:
        width, height = self.size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
                ' font-family="system-ui, sans-serif" font-size="13">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
                f' markerHeight="7" orient="auto-start-reverse">'
                f'<path d="M0 0 10 5 0 10z" fill="{EDGE}"/></marker></defs>',
                f'<rect width="{width}" height="{height}" rx="8" fill="#f8fafc"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def architecture() -> Picture:
    """The picture of controller, coordinator and worker with their connections."""
    p = Picture("A controller, a coordinator and a worker, and the connections between them", 880, 430)
    p.box(20, 20, 840, 92, ["Controller: the machine on which you type"], GREY, top=True)
    p.box(40, 52, 240, 46, ["Playbooks", "setup, doctor, train, status, stop"], WHITE)
    p.box(320, 52, 240, 46, ["Console", "python -m fleet watch"], WHITE)
    p.box(600, 52, 240, 46, ["Data and wheels", "prepared once, sent to every host"], WHITE)
    p.arrow(220, 112, 220, 158)
    p.arrow(660, 112, 660, 158)
    p.text(440, 140, "SSH, encrypted: commands, wheels, data, logs, checkpoints", muted=True)
    for x, name, rank, more in (
        (20, "Coordinator", "rank 0", ["checkpoints, metrics"]),
        (500, "Worker (none, one or many)", "rank 1, 2, ...", ["run files, log"]),
    ):
        p.box(x, 160, 360, 250, [name], GREY, top=True)
        p.box(x + 20, 194, 320, 120, ["systemd unit nanofleet-RUN_ID"], BLUE, top=True)
        p.box(
            x + 40,
            226,
            280,
            74,
            ["torchrun", f"{rank}: python -m trainer train", "model, optimizer, health endpoint"],
            WHITE,
        )
        p.box(x + 180, 330, 160, 62, ["/var/lib/nanofleet", "dataset (same sha256)", *more], WHITE)
    p.box(40, 330, 140, 62, ["MLflow tracker", "port 5000"], GREEN)
    p.box(520, 330, 140, 62, ["Environment", "/opt/nanofleet", "same versions"], WHITE)
    p.arrow(342, 250, 538, 250, both=True)
    p.text(440, 226, "Gloo or NCCL", muted=True)
    p.text(440, 242, "20000-20999", muted=True)
    p.arrow(538, 284, 342, 284)
    p.text(440, 276, "store 29500", muted=True)
    p.arrow(110, 300, 110, 328)
    return p


def lifecycle() -> Picture:
    """The picture of the states of a run, from train.yml to its outcome."""
    p = Picture("The states of a run from train.yml to its outcome", 880, 330)
    p.box(20, 40, 140, 62, ["train.yml", "checks settings,", "hosts and data"], GREY)
    p.box(200, 40, 140, 62, ["Unit starts", "one on each host"], BLUE)
    p.box(380, 40, 140, 62, ["Rendezvous", "ranks find", "each other"], BLUE)
    p.box(560, 40, 140, 62, ["Consistency", "all that must", "be equal"], BLUE)
    p.box(720, 40, 140, 62, ["Resume", "from the newest", "whole checkpoint"], BLUE)
    for x in (160, 340, 520, 700):
        p.arrow(x, 71, x + (38 if x < 700 else 18), 71)
    p.arrow(790, 102, 790, 148)
    p.box(
        560,
        150,
        300,
        62,
        ["Steps", "batch, forward, backward, sync, optimizer", "evaluation and checkpoint at intervals"],
        GREEN,
    )
    p.box(20, 250, 190, 62, ["finished", "all steps are done"], WHITE)
    p.box(235, 250, 190, 62, ["stopped", "stop.yml: saved first"], WHITE)
    p.box(450, 250, 190, 62, ["final", "a restart cannot help"], RED)
    p.box(665, 250, 195, 62, ["retryable", "a restart can help"], AMBER)
    p.arrow(600, 212, 130, 248)
    p.arrow(640, 212, 340, 248)
    p.arrow(680, 212, 550, 248)
    p.arrow(770, 212, 765, 248)
    p.parts.append(
        f'<path d="M860 281 H872 V20 H270 V38" fill="none" stroke="{EDGE}" stroke-width="1.5"'
        ' stroke-dasharray="5 4" marker-end="url(#tip)"/>'
    )
    p.text(560, 14, "systemd restarts the unit: next attempt", muted=True)
    return p


def batch() -> Picture:
    """The picture of the rows of a step on two ranks, split equally and by speed."""
    p = Picture("The rows of a step, split equally and by speed", 880, 240)
    p.text(
        20,
        30,
        "The 16 rows of step s are a function of the seed and s. Ranks take slices of them.",
        anchor="start",
    )
    for y, name, first in ((50, "shares=equal", 8), (140, "shares=auto", 13)):
        p.text(20, y + 38, name, bold=True, anchor="start")
        for row in range(16):
            fill = BLUE if row < first else AMBER
            p.parts.append(
                f'<rect x="{150 + 44 * row}" y="{y + 10}" width="40" height="46" rx="4" fill="{fill}"'
                f' stroke="{EDGE}"/>'
            )
            p.text(170 + 44 * row, y + 38, str(row))
        p.text(150, y + 76, f"rank 0: {first} rows", anchor="start", muted=True)
        p.text(150 + 44 * first, y + 76, f"rank 1: {16 - first} rows", anchor="start", muted=True)
    return p


# By sync mode: title, spans of the compute lane, spans of the network lane, note. A span is (start, width,
# label, color). Spans show the order only, not measured times.
MODES: dict[str, tuple[str, list[tuple[int, int, str, str]], list[tuple[int, int, str, str]], str]] = {
    "dense": (
        "sync=dense: every gradient, after backward",
        [(0, 130, "forward", BLUE), (130, 200, "backward", BLUE), (510, 130, "optimizer", GREEN)],
        [(330, 180, "all gradients, float32", AMBER)],
        "The processor waits while the gradients travel.",
    ),
    "exact": (
        "sync=exact: the same sums, sent during backward",
        [(0, 130, "forward", BLUE), (130, 200, "backward", BLUE), (340, 90, "own matrices", GREEN)],
        [(160, 175, "buckets, active rows", AMBER), (430, 110, "parameters", AMBER)],
        "Each matrix has one owner rank, which steps it and broadcasts the result.",
    ),
    "fast": (
        "sync=fast: as exact, bfloat16 on the network",
        [(0, 130, "forward", BLUE), (130, 200, "backward", BLUE), (335, 90, "own matrices", GREEN)],
        [(160, 90, "half the bytes", AMBER), (425, 60, "params", AMBER)],
        "Sums, moments and weights stay float32.",
    ),
    "local": (
        "sync=local: independent steps, one sync round every local_steps",
        [(step * 107, 103, f"step {step + 1}", BLUE) for step in range(6)],
        [(step * 107 + 20, 80, f"part {step + 1}", AMBER) for step in range(6)],
        "Parts of the model have their sync round at different steps, so the link is used evenly.",
    ),
}


def mode(name: str) -> Picture:
    """The picture of a step in the sync mode `name`: what is computed and sent, over time."""
    title, compute, network, note = MODES[name]
    p = Picture(title, 780, 190)
    p.text(20, 28, title, bold=True, anchor="start")
    for y, lane, spans in ((44, "compute", compute), (96, "network", network)):
        p.text(20, y + 26, lane, anchor="start", muted=True)
        for start, width, label, fill in spans:
            p.box(110 + start, y, width, 42, [], fill)
            p.text(110 + start + width / 2, y + 26, label)
    p.text(20, 168, note, anchor="start", muted=True)
    return p


def pictures() -> dict[Path, str]:
    """The path and SVG text of every picture."""
    drawn = {"architecture": architecture(), "lifecycle": lifecycle(), "batch": batch()}
    drawn |= {f"sync-{name}": mode(name) for name in MODES}
    return {ASSETS / f"{name}.svg": picture.svg() for name, picture in drawn.items()}


if __name__ == "__main__":
    sys.exit(write("docs_diagrams", __doc__ or "", pictures()))
