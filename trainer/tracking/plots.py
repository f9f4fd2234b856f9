"""Plots of a run from metrics.jsonl: plots/loss.png and plots/throughput.png.

matplotlib is never imported in the process that trains.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.files import write_whole
from trainer.health.run_status import STEP_PHASES
from trainer.tracking import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 4_000  # of a line, about


def prepare() -> None:
    """Import matplotlib and draw an empty figure, so that a later `make_plots` takes 0.2 s, not 1.3 s."""
    with _own_cache():
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        figure.subplots().set_title("loss")
        figure.savefig(io.BytesIO(), format="png")


def make_plots(run_dir: Path) -> list[Path]:
    """Draw the plots for which metrics.jsonl has values; returns their paths.

    If there are plots and all of them are at least as new as metrics.jsonl, nothing is drawn.
    """
    folder = run_dir / files.PLOTS
    metrics = run_dir / files.METRICS
    made = list(folder.glob("*.png"))
    if made and min(path.stat().st_mtime for path in made) >= metrics.stat().st_mtime:
        return made
    series = read_series(metrics)
    plots = (("loss", "loss", _loss), ("tok_per_s", "throughput", _throughput))
    drawn = [(name, draw) for figure, name, draw in plots if figure in series]
    if not drawn:
        return []
    folder.mkdir(exist_ok=True)
    with _own_cache():
        return [_draw(folder / f"{name}.png", draw, series) for name, draw in drawn]


@contextmanager
def _own_cache() -> Iterator[None]:
    """Context in which matplotlib has a temporary folder for its cache, unless MPLCONFIGDIR is set.

    The user of the run may have no home directory.
    """
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("MPLCONFIGDIR", cache)
        yield


Series = dict[str, tuple[list[int], list[float]]]


def read_series(path: Path) -> Series:
    """Read metrics.jsonl. Returns (steps, values) by name: {"loss": ([1, 2], [10.2, 9.8]), ...}.

    path: the file. Of a long series, only every n-th point is kept, so that fewer than 2 * POINTS remain.
    """
    counts: Counter[str] = Counter()
    for _, line in files.read_lines(path):
        counts.update(line.keys())
    series: Series = {}
    seen: Counter[str] = Counter()
    for _, line in files.read_lines(path):
        for name in line.keys() - {"step", "time"}:
            if isinstance(line[name], int | float) and seen[name] % max(1, counts[name] // POINTS) == 0:
                steps, values = series.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(line[name])
            seen[name] += 1
    return series


def _draw(path: Path, draw: Any, series: Series) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    draw(figure, series)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_whole(path, data.getvalue())
    return path


def _loss(figure: Figure, series: Series) -> None:
    axes = figure.subplots()
    _line(axes, series, "loss", "training loss", linewidth=0.8)
    _line(axes, series, "val_loss", "validation loss", marker="o", markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    if "val_bpb" in series:
        right = axes.twinx()
        _line(right, series, "val_bpb", "bits per byte (right)", marker="s", markersize=4, color="tab:green")
        right.set_ylabel("bits per byte")
        lines = [*axes.get_lines(), *right.get_lines()]
        right.legend(handles=lines, loc="upper right")
    axes.grid(alpha=0.3)


def _throughput(figure: Figure, series: Series) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    _line(above, series, "tok_per_s", "", linewidth=0.8)
    above.set(ylabel="tokens per second", title="Throughput", ylim=(0, None))
    phases = [name for name in STEP_PHASES if f"{name}_s" in series]
    if phases:
        steps = series[f"{phases[0]}_s"][0]
        below.stackplot(steps, *(series[f"{name}_s"][1] for name in phases), labels=phases)
        below.legend(loc="upper right", ncols=len(phases), fontsize="small")
    below.set(xlabel="step", ylabel="seconds of a step")
    for axes in (above, below):
        axes.grid(alpha=0.3)


def _line(axes: Axes, series: Series, name: str, label: str, **style: Any) -> None:
    if name in series:
        axes.plot(*series[name], label=label, **style)
