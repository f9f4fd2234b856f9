"""Follow a run to its end: join it, show it, and report how it ended. Leaving (Ctrl-C) never ends the run.

If a rebooted host does not start the run again by itself, the follower runs train.yml for it.
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
from fleet.stages import failed, run_playbook

FINISHED, FAILED, STOPPED = 0, 1, 3
"""Exit codes of the commands that follow a run."""

WATCH = "playbooks/watch.yml"
WATCH_TASK = "Watch the run"
"""The task of watch.yml whose results, at each retry, are the reports of the hosts."""
_RETRY_SECONDS = (2, 5, 10, 20, 30)
_TRIES, _OVER_TRIES, _BACK_TRIES = 20, 3, 10
"""The most tries: while no host answers; for the end of a lost host once the others have ended; and, after
the run was started again on a rebooted host, until it is active or settled."""
_SNAPSHOT_AT = 0.6
_ASK_ANEW_SECONDS = 20.0
"""Seconds for which the other hosts are followed before a host that has left the run is asked again."""


class _AskAnewError(Exception):
    """Ends one run of watch.yml, because a host that left must be asked again or started again."""


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
    _lives: bool = False
    _put_back: set[tuple[str, float]] = field(default_factory=set)
    _history: threading.Thread | None = None
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        usual = str(ROOT / "inventory" / "lab")
        given, asks = self.inventory or usual, self.become_password is not None
        self.view.options = commands.options([given], [usual], asks, Path.cwd())

    def follow(self) -> int:
        """Follow the run until it has ended on every host; returns the exit code.

        Raises CancelledError on Ctrl-C.
        """
        silent = backs = 0
        while True:
            job = self._job("watch", playbook=WATCH, args=self.args)
            before, self._began = self._reports, time.monotonic()
            self._show()
            try:
                good = job.follow(self._tick, self._fold)
            except _AskAnewError:
                self._put_hosts_back()
                continue
            finally:
                self.screen.clear()
            self._put_hosts_back()
            self.view.lost = {one.host: one.message for one in job.stage.failures if one.unreachable}
            if not (good or self.view.lost or _ran_out(job)):
                self.screen.say(failed(job))
                return FAILED
            over = self.view.ended and not self._away
            if over and self._put_back and not self.view.settled and backs < _BACK_TRIES:
                backs += 1
                self._wait(_RETRY_SECONDS[1], "the run is active on no host, but not ended; checking again")
                continue
            backs = backs if over else 0
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

    @property
    def _away(self) -> dict[str, float]:
        """The rebooted hosts, with their boot time, on which the run must be started again.

        Empty if the run was not active while it was followed, and without hosts that were started before.
        """
        rebooted = self.view.rebooted if self._lives else {}
        return {host: at for host, at in rebooted.items() if (host, at) not in self._put_back}

    def _put_hosts_back(self) -> None:
        """Start the run again on rebooted hosts with train.yml, once every host of the run answers."""
        hosts = self._away
        if not hosts or self.view.lost:
            return
        if hosts.keys() <= set(self.view.returning):
            self._wait(
                _RETRY_SECONDS[1], f"{', '.join(sorted(hosts))} starts the run again by itself; looking again"
            )
            return
        self._put_back |= set(hosts.items())
        self.screen.say(Text("\n".join([*self.view.reboots, "Doing that now:"]), style="yellow"))
        args = [*self.args, "-e", f"run_id={self.view.run_id}"]
        run_playbook(self.screen, self._job("train", playbook="train.yml", args=args))

    def _conclude(self) -> int:
        if not self.view.found:
            self.screen.say(
                Text("No host knows such a run. To start one, type: python -m fleet train -e depth=4")
            )
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
        self._lives = self._lives or not data["res"].get("ended", True)
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
        if self._away and not self.view.lost:
            raise _AskAnewError
        some = self.view.lost or any(ending.ended for ending in self.view.endings.values())
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
