"""Follow a run to its end: join it, show it, and report how it ended. Leaving (Ctrl-C) never ends the run.

A host that left the run, because it cannot be reached or was rebooted, is asked for again.
"""

import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from fleet import ROOT
from fleet.playbooks import CancelledError, Event, Job, message
from fleet.progress import Screen, lost_lines, odd_lines, run_panel, run_plain
from fleet.runview import RunView, commands, is_report
from fleet.stages import failed

FINISHED, FAILED, STOPPED = 0, 1, 3
"""Exit codes of the commands that follow a run."""

WATCH = "playbooks/watch.yml"
WATCH_TASK = "Watch the run"
"""The task of watch.yml whose results, at each retry, are the reports of the hosts."""
_RETRY_SECONDS = (2, 5, 10, 20, 30)
_TRIES, _OVER_TRIES = 20, 3
"""How often nobody may answer, and how often a lost host is asked for its end when the others have ended."""
_SNAPSHOT_AT = 0.6
_ASK_ANEW_SECONDS = 20.0
"""Seconds for which the other hosts are followed before a host that has left the run is asked again."""


class _AskAnewError(Exception):
    """Ends one look at the run: a host that left it is to be asked for again."""


@dataclass
class Follower:
    """Follows one run: repeats watch.yml, also after lost connections, and updates `view` with its reports.

    args: options of ansible-playbook; snapshot: the view at 60 % of the steps; trouble: a line for the view.
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
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        usual = str(ROOT / "inventory" / "lab")
        given, asks = self.inventory or usual, self.become_password is not None
        self.view.options = commands.options([given], [usual], asks, Path.cwd())

    def follow(self) -> int:
        """Until the run has ended on every host. Returns an exit code; raises CancelledError on Ctrl-C."""
        silent = 0
        while True:
            job = self._job("watch", playbook=WATCH, args=self.args)
            before, self._began = self._reports, time.monotonic()
            self._show()
            try:
                good = job.follow(self._tick, self._fold)
            except _AskAnewError:
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
                doing = f"the run does not need this console; asking {lost} again"
                self._wait(_RETRY_SECONDS[min(silent, len(_RETRY_SECONDS) - 1)], doing)
            elif returning:
                doing = f"the run starts again by itself on {', '.join(sorted(returning))}; checking again"
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
        step, total = self.view.step or 0, self.view.num_iterations or 1
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
                args=["--become"],
            )
            if job.follow(lambda: None) and copy.exists():
                self.view.history(copy.read_text(encoding="utf-8", errors="replace").splitlines())

    def _show(self) -> None:
        self.screen.show(lambda: run_panel(self.view, self.screen.console.width, self.trouble))

    def _tell(self) -> None:
        """Without a terminal, print each new line that needs attention, once."""
        odd = {} if self.screen.is_live else odd_lines(self.view)
        for what, line in odd.items():
            if what not in self._told:
                self.screen.say(Text(line))
        self._told = set(odd)

    def _tick(self) -> None:
        self._tell()
        self.screen.plain(lambda: run_plain(self.view))
        some = self.view.lost or any(state.get("ended") for state in self.view.states.values())
        if some and not self.view.ended and time.monotonic() - self._began > _ASK_ANEW_SECONDS:
            raise _AskAnewError

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
    """Whether watch.yml failed only because its retries are used up: the run takes longer than one watch."""
    return bool(job.stage.failures) and all(failure.retried for failure in job.stage.failures)
