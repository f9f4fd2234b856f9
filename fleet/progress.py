"""The display of the console: pure functions from state to rich renderables, and the screen that shows them.

The view is the part that changes, such as the progress of a playbook or a run. In a terminal the view is
redrawn in place, and finished lines scroll above it. In other output (CI, a pipe) the view is a plain line,
printed at most every PLAIN_SECONDS.
"""

import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleet.playbooks import Failure, Stage
from fleet.runview import RunView
from fleet.text import curve, number
from trainer.formatting import duration

PLAIN_SECONDS, STILL_SECONDS = 5.0, 30.0
"""Without a terminal: seconds between prints of a view that changes, and of one that does not."""

ATTENTION = ("Rebooted:", "Frozen:", "Diagnosis:", "Network:", "Stop:", "No rank")
"""The first words of the status lines that are highlighted."""
_ATTEMPT = re.compile(r"  \S+ \d\d:\d\d:\d\d  \w+")
"""Matches the status line about an attempt that has ended."""


def stage_line(stage: Stage, seconds: float) -> Text:
    """The line about a running playbook: its name, play, task, hosts still at the task, and time so far.

    stage: the progress of the playbook. seconds: seconds since its start.
    """
    text = Text.assemble((stage.name, "bold"), "  ", stage.play or "starting Ansible")
    if stage.task:
        text.append(f" · {stage.task}")
    if stage.waiting:
        shown = [
            f"{host} ({stage.retries[host]})" if host in stage.retries else host for host in stage.waiting
        ]
        text.append(f"  [{', '.join(shown)}]", style="dim")
    text.append(f"  {duration(seconds)}", style="cyan")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def stage_plain(stage: Stage) -> str:
    """The line of a running playbook for output without a terminal. stage: its progress."""
    return f"{stage.name}  {stage.play or 'starting Ansible'}" + (f" · {stage.task}" if stage.task else "")


def done_line(name: str, seconds: float, detail: str = "") -> Text:
    """The line of a stage that succeeded: its name, its duration and `detail`."""
    line = Text.assemble(("✓ ", "bold green"), f"{name:<8}", (f"{duration(seconds):>7}", "cyan"))
    return line.append(f"  {detail}", style="dim") if detail else line


def failure_lines(name: str, failures: Sequence[Failure], tail: Sequence[str], log: str) -> Text:
    """The text of a stage that has failed: hosts, task and message of each failure, and the path of its log.

    name: name of the stage. failures: failures of its tasks. tail: the last lines of the log, shown if
    `failures` is empty. log: path of the log.
    """
    text = Text.assemble(("✗ ", "bold red"), (f"{name} failed", "bold"))
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for failure in failures:
        hosts = groups.setdefault((failure.unreachable, failure.task, failure.message), [])
        hosts += [failure.host] if failure.host not in hosts else []
    for (unreachable, task, output), hosts in groups.items():
        what = "could not be reached at" if unreachable else "failed at"
        text.append(f"\n\n{', '.join(hosts)} {what}: {task}\n", style="bold")
        text.append("\n".join(f"  {line}" for line in output.splitlines()))
    if not failures:
        text.append("\n\n").append("\n".join(f"  {line}" for line in tail))
    return text.append(f"\n\nThe whole output: {log}")


def run_plain(view: RunView) -> str:
    """The state of a run in one line, for output without a terminal. view: the state of the run."""
    if not view.states and not view.lost:
        return "asking every host for the run"
    figures = view.figures
    phases = ", ".join(f"{rank.host} {rank.phase}" for rank in view.ranks if rank.phase)
    if not figures.get("step"):
        return f"{view.title}: {phases or ('waiting for the first step' if view.found else 'no host has it')}"
    pace = (
        f"  {number(figures.get('tok_per_s'))} tok/s  eta {duration(figures.get('eta_seconds'))}"
        if view.is_training
        else ""
    )
    step = f"step {figures.get('step')}/{figures.get('num_iterations') or '?'}"
    return f"{view.title}: {step}  loss {number(view.loss, 4)}{pace}  {phases}"


def run_panel(view: RunView, width: int = 100, trouble: str = "") -> RenderableType:
    """The view of a run that trains: progress, loss and its curve, and the report of status.yml on its hosts.

    view: the state of the run. width: number of columns. trouble: text for the last line, such as about a
    lost host; "" for no such line.
    """
    if not view.ranks and not trouble and not view.lost:
        return Text("asking every host for the run")
    head = Text.assemble((view.title, "bold"), (f"  {view.plan}", "dim"))
    figures = view.figures
    total = figures.get("num_iterations") or 1
    step = figures.get("step") or 0
    wide = max(10, min(60, width - 4))
    facts = Text.assemble(
        (f"step {step}/{figures.get('num_iterations') or '?'}", "bold"),
        f"   {100 * step // total} %   loss ",
        (number(view.loss, 4), "bold"),
        (f" (first {number(view.first_loss, 4)})", "dim"),
        f"   {number(figures.get('step_seconds'), 2)} s a step",
    )
    bar = Table.grid()  # a ProgressBar does not end its line
    bar.add_row(ProgressBar(total=total, completed=step, width=wide))
    parts: list[RenderableType] = [head, bar, facts]
    if len(view.losses) > 1:
        parts.append(Text("\n".join(curve(view.curve, wide - 8, 3)), style="green", no_wrap=True))
    parts.append(Text())
    parts += [Text(line, style="yellow" if line.startswith(ATTENTION) else "") for line in view.screen]
    parts += [Text(line, style="yellow") for line in lost_lines(view)]
    if trouble:
        parts.append(Text(trouble, style="yellow"))
    return Padding(Group(*parts), (0, 0, 0, 2))


def attention_lines(view: RunView) -> dict[str, str]:
    """The status lines of a run that need attention: {key: line}. view: the state of the run.

    They contain the diagnosis of a delay, unreachable hosts, warnings, and the end of each attempt. Lines
    that differ only in numbers have one key: the line with `#` for every number. The key of a line about an
    attempt or a lost host is the line itself.
    """
    lines = [
        line for line in view.screen if line.startswith((*ATTENTION, "Warning:")) or _ATTEMPT.match(line)
    ]
    keyed = [(line if _ATTEMPT.match(line) else re.sub(r"\d[\d.,]*", "#", line), line) for line in lines]
    return dict(keyed) | {line: line for line in lost_lines(view)}


def lost_lines(view: RunView) -> list[str]:
    """One line for each host that cannot be reached, with the first line of Ansible's message."""
    return [f"{host} cannot be reached: {why.splitlines()[0]}" for host, why in sorted(view.lost.items())]


def report(view: RunView, places: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """The report of a run that has ended: outcome, reason, errors, loss curve, generated text, and `places`.

    view: the state of the run. places: (name, path or address) of the checkpoint, the log and the tracker.
    """
    figures = view.figures
    marks = {"finished": ("✓ ", "bold green"), "stopped": ("● ", "bold yellow")}
    head = Text.assemble(
        marks.get(view.outcome, ("✗ ", "bold red")), (f"{view.title}: {view.outcome}", "bold")
    )
    if view.reason:
        head.append(f". {view.reason}")
    parts: list[RenderableType] = [head]
    if view.outcome not in marks:
        for host, state in sorted(view.states.items()):
            if state.get("error"):
                lines = "\n".join(f"  {line}" for line in state["error"])
                parts += [Text(f"\n{host}:", style="bold"), Text(lines)]
    parts += [Text(line, style="yellow") for line in [*lost_lines(view), *view.reboots]]
    if drawn := curve(view.curve):
        parts.append(Text("\n" + "\n".join(drawn), style="green", no_wrap=True))
    if view.loss is not None:
        facts = f"\nloss {number(view.first_loss, 3)} at the first step, {number(view.loss, 3)} at the last"
        if figures.get("val_bpb") is not None:
            facts += f"; validation {number(figures.get('val_bpb'), 3)} bits per byte"
        parts.append(Text(facts))
    if figures.get("sample"):
        sample = [line.rstrip() for line in figures["sample"].splitlines() if line.strip()]
        shown = "\n".join(sample[:10] + ["..."] * (len(sample) > 10))
        parts += [Text("\nSample:", style="bold"), Padding(Text(shown), (0, 0, 0, 2))]
    if places:
        left = max(len(name) for name, _ in places)
        parts.append(Text("\n" + "\n".join(f"{name:<{left}}  {value}" for name, value in places)))
    return Group(*parts)


class Screen:
    """The output of the console: a terminal with a view that is redrawn, or plain lines. A context manager.

    console: a Console of rich; None for standard output. The attribute `lines` has the lines that `say` has
    printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.lines: list[RenderableType] = []
        self._live: Live | None = None
        self._last_plain = ("", 0.0)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def say(self, line: RenderableType) -> None:
        """Print a line that stays on the screen, above the current view."""
        self.lines.append(line)
        self.console.print(line)

    def show(self, draw: Callable[[], RenderableType]) -> None:
        """In a terminal, draw a view on the last lines, and redraw it until `clear` is called.

        draw: function that returns the view. In other output, nothing is drawn.
        """
        self.clear()
        if self.is_live:
            self._live = Live(get_renderable=draw, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def plain(self, text: Callable[[], str], seconds: float | None = None, now: bool = False) -> None:
        """Without a terminal, print a line about the current view, at most every PLAIN_SECONDS.

        text: function that returns the line. seconds: the time so far, which is appended; an unchanged line
        is then printed again after STILL_SECONDS. Without `seconds`, an unchanged line is not printed again.
        now: whether the line may be printed earlier than PLAIN_SECONDS after the last line.
        """
        last, when = self._last_plain
        quiet = time.monotonic() - when
        if self.is_live or (not now and quiet < PLAIN_SECONDS):
            return
        line = text()
        if line == last and (seconds is None or quiet < STILL_SECONDS):
            return
        self._last_plain = (line, time.monotonic())
        self.console.print(Text(line if seconds is None else f"{line}  {duration(seconds)}"))

    def clear(self) -> None:
        """Remove the current view from the screen."""
        if self._live:
            self._live.stop()
            self._live = None


def record(path: str, title: str, parts: Sequence[RenderableType], width: int = 100) -> None:
    """Write `parts`, one below the other, as an SVG picture to `path`; `width` is in columns."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Group(*parts))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(path, title=title)
