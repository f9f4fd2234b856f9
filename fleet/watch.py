"""Follows a run to its end and reports its outcome. Ctrl-C ends only the console, never the run.

A host that cannot be reached, or was rebooted, is queried again.
"""

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from fleet import FleetError, inventory
from fleet.playbooks import CancelledError, Event, Job, message
from fleet.progress import Screen, attention_lines, lost_lines, record, report, run_panel, run_plain
from fleet.runview import RunView, commands, is_report
from fleet.stages import failed

FINISHED, FAILED, STOPPED = 0, 1, 3
"""Exit codes of the commands that follow a run."""

WATCH = "playbooks/watch.yml"
WATCH_TASK = "Watch the run"
"""The task of watch.yml whose results, at each retry, are the reports of the hosts."""
_RETRY_SECONDS = (2, 5, 10, 20, 30)
_TRIES, _OVER_TRIES = 20, 3
"""The most consecutive queries that no host answers.

_OVER_TRIES: the most queries of an unreachable host once the run has ended on all other hosts.
"""
_SNAPSHOT_AT = 0.6
_RESTART_WATCH_SECONDS = 20.0
"""Seconds after which watch.yml is restarted if it has stopped querying a host.

It stops querying a host that is unreachable, or on which the run has ended.
"""


class _RestartWatchError(Exception):
    """Raised to end watch.yml, which is then restarted to query all hosts (see _RESTART_WATCH_SECONDS)."""


@dataclass
class RunFollower:
    """Follows one run by repeating watch.yml, also after lost connections.

    screen: shows the run. inventory: path of the inventory; None: that of inventory.usual.
    args: options of ansible-playbook. become_password: password for sudo; None if sudo needs no password.
    view: the state of the run. snapshot: the view as it was at 60 % of the steps; None before.
    trouble: the last line on the screen, about lost hosts; "" for no such line.
    """

    screen: Screen
    inventory: str | None
    args: list[str]
    become_password: str | None = None
    view: RunView = field(default_factory=RunView)
    snapshot: RenderableType | None = None
    trouble: str = ""
    _reports: int = 0
    _began: float = 0.0
    _history: threading.Thread | None = None
    _printed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        usual = inventory.usual()
        given, asks = [self.inventory] if self.inventory else usual, self.become_password is not None
        self.view.options = commands.options(given, usual, asks, Path.cwd())

    def follow(self) -> int:
        """Follow the run until it has ended on every host; returns the exit code of the command.

        The exit code is FINISHED, STOPPED or FAILED. Raises CancelledError on Ctrl-C.
        """
        silent = 0
        while True:
            job = self._job("watch", playbook=WATCH, args=self.args)
            before, self._began = self._reports, time.monotonic()
            self._show()
            try:
                good = job.follow(self._tick, self._fold)
            except _RestartWatchError:
                continue
            finally:
                self.screen.clear()
            self.view.lost = {one.host: one.message for one in job.stage.failures if one.unreachable}
            if not (good or self.view.lost or _ran_out(job)):
                self.screen.say(failed(job))
                return FAILED
            returning = self.view.returning
            over = self.view.ended and not returning
            silent = silent + 1 if over or self._reports == before else 0
            if over and (not self.view.lost or silent >= _OVER_TRIES):
                return self._conclude()
            if silent >= _TRIES:
                self.screen.say(failed(job))
                return FAILED
            if self.view.lost:
                lost = ", ".join(sorted(self.view.lost))
                doing = f"the run does not need this console; querying {lost} again"
                self._wait(_RETRY_SECONDS[min(silent, len(_RETRY_SECONDS) - 1)], doing)
            elif returning:
                doing = f"the run restarts by itself on {', '.join(sorted(returning))}; checking again"
                self._wait(_RETRY_SECONDS[1], doing)

    def _conclude(self) -> int:
        if not self.view.found:
            self.screen.say(Text(self.view.unknown))
            return FAILED
        if self._history:
            self._history.join(30)
        self._read_history()
        return {"finished": FINISHED, "stopped": STOPPED}.get(self.view.outcome, FAILED)

    def _job(self, name: str, **what: object) -> Job:
        return Job(name, inventory=self.inventory, become_password=self.become_password, **what)  # type: ignore[arg-type]

    def _fold(self, event: Event) -> None:
        data = event.get("event_data") or {}
        if event.get("event") == "runner_on_unreachable":
            self.view.lost[data.get("host", "")] = message(data.get("res"))
        if event.get("event") not in ("runner_retry", "runner_on_ok") or data.get("task") != WATCH_TASK:
            return
        if not is_report(data.get("res")):
            return
        self._reports += 1
        self.trouble = ""
        self.view.fold(data.get("host", ""), data["res"])
        figures = self.view.figures
        step, total = figures.get("step") or 0, figures.get("num_iterations") or 1
        if self.snapshot is None and step >= _SNAPSHOT_AT * total and not self.view.ended:
            self.snapshot = run_panel(self.view)
        if self._history is None and self.view.run_dir and step > 1 and not self.view.ended:
            # The run began before it was followed: its earlier losses are in its metrics file.
            self._history = threading.Thread(target=self._read_history, daemon=True)
            self._history.start()

    def _read_history(self) -> None:
        """Read all losses from metrics.jsonl of the coordinator into the view; a failure is ignored."""
        with tempfile.TemporaryDirectory(prefix="nanofleet-") as folder:
            copy = Path(folder) / "metrics.jsonl"
            arguments = f"src={self.view.run_dir}/metrics.jsonl dest={copy} flat=true fail_on_missing=false"
            job = self._job(
                "metrics",
                module="ansible.builtin.fetch",
                module_args=arguments,
                pattern=self.view.coordinator,
                args=["--become", *self.args],
            )
            if job.follow(lambda: None) and copy.exists():
                self.view.history(copy.read_text(encoding="utf-8", errors="replace").splitlines())

    def _show(self) -> None:
        self.screen.show(lambda: run_panel(self.view, self.screen.console.width, self.trouble))

    def _tick(self) -> None:
        # In a terminal these lines are part of the panel.
        lines = {} if self.screen.is_live else attention_lines(self.view)
        for text, line in lines.items():
            if text not in self._printed:
                self.screen.say(Text(line))
        self._printed = set(lines)
        self.screen.plain(lambda: run_plain(self.view))
        some = self.view.lost or any(state.get("ended") for state in self.view.states.values())
        if some and not self.view.ended and time.monotonic() - self._began > _RESTART_WATCH_SECONDS:
            raise _RestartWatchError

    def _wait(self, seconds: int, doing: str) -> None:
        """Show the lost hosts and `doing`, the next action, and wait `seconds`."""
        self.trouble = f"{doing} in {seconds} s"
        self.screen.plain(lambda: "\n".join([*lost_lines(self.view), self.trouble]), now=True)
        self._show()
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            raise CancelledError from None
        finally:
            self.screen.clear()


def _ran_out(job: Job) -> bool:
    """Whether watch.yml failed only because its retries are used up, as during a long run."""
    return bool(job.stage.failures) and all(failure.retried for failure in job.stage.failures)


def close(
    screen: Screen,
    follower: RunFollower,
    last: Sequence[tuple[str, str]] = (),
    title: str = "python -m fleet watch",
    picture: str | None = None,
) -> None:
    """Print the report of a run that has ended; nothing if no host has the run.

    screen: shows the report. follower: that of this run. last: more (name, text) lines for the end of the
    report. title: title of the picture. picture: path to which the whole screen is written as an SVG picture;
    None for no picture.
    """
    if not follower.view.found:
        return
    before = list(screen.lines)
    ending = report(follower.view, [*places(follower.view, follower.inventory, follower.args), *last])
    screen.say("")
    screen.say(ending)
    if picture:
        middle: list[RenderableType] = ["", follower.snapshot] if follower.snapshot else []
        record(picture, title, [*before, *middle, "", ending])
        screen.say(f"\nThe picture: {picture}")


def places(view: RunView, where: str | None, extra: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The places of the checkpoint, the log and the tracker's page, as far as they are known.

    view: the state of the run. where: path of the inventory; None: that of inventory.usual. extra: `-e`
    options, which override variables of the inventory. Returns a list of (name, path or address).
    """
    found = []
    if path := str(view.figures.get("checkpoint") or ""):
        path = path if path.startswith("/") else f"{view.run_dir}/{path}"
        found.append(("checkpoint", f"{view.coordinator}:{path}"))
    if view.run_dir:
        found.append(("log", f"{view.coordinator}:{view.run_dir}/train.log"))
    try:
        found.append(("MLflow", inventory.tracker(inventory.read(where, extra))))
    except FleetError as error:
        found.append(("MLflow", f"its address is not known: {error}"))
    return found
