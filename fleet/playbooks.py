"""Run a playbook through ansible-runner: follow its events, cancel it, keep its log.

The playbook runs in a terminal session of its own, so Ctrl-C reaches only this process, which then stops the
playbook the way Ctrl-C in its own terminal would. The whole output is kept in ``.cache/logs/<stage>.log``;
host, task and message of a failure are shown in full.
"""

import contextlib
import os
import queue
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner

from fleet import CACHE, ROOT

Event = dict[str, Any]

_CANCEL_SECONDS = 10.0
"""Seconds that a playbook may take to end by itself after Ctrl-C; then it is killed."""
NO_REASON = "The task returned no message; its output is in the log."
_DEBUG = ("ansible.builtin.debug", "debug")


@dataclass(frozen=True)
class Failure:
    """A task that has failed on a host.

    host, task: names of the host and the task. message: why the task has failed, with its output.
    unreachable: whether SSH did not reach the host.
    retried: whether Ansible had repeated the task as often as its `retries` allow.
    """

    host: str
    task: str
    message: str
    unreachable: bool = False
    retried: bool = False


@dataclass
class Stage:
    """The progress of a running playbook, from the events of ansible-runner so far.

    name: name of the stage. play, task: names of the current play and task.
    pid: process id of ansible-playbook; 0 before it is known.
    changed: number of task results that have changed a host.
    notes: the messages of debug tasks. failures: tasks that have failed.
    retries: {host: "ATTEMPT/RETRIES"} for the hosts on which the current task is retried.
    """

    name: str
    play: str = ""
    task: str = ""
    pid: int = 0
    changed: int = 0
    notes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    retries: dict[str, str] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)

    def fold(self, event: Event) -> None:
        """Update the progress with one event of ansible-runner, a dict with event, event_data and pid."""
        data = event.get("event_data") or {}
        kind = event.get("event", "")
        host = data.get("host", "")
        self.pid = int(event.get("pid") or self.pid)
        if kind == "playbook_on_play_start":
            self.play = data.get("name") or data.get("play") or ""
        elif kind in ("playbook_on_task_start", "playbook_on_handler_task_start"):
            task = data.get("name") or data.get("task") or ""
            self.task = task.removeprefix("nanofleet.fleet.")
            self._waiting, self.retries = set(), {}
        elif kind == "runner_on_start":
            self._waiting.add(host)
        elif kind == "runner_retry":
            result = data.get("res") or {}
            self.retries[host] = f"{result.get('attempts', '?')}/{(result.get('retries') or 1) - 1}"
        elif kind == "runner_on_ok":
            self._finish(host)
            self.changed += bool((data.get("res") or {}).get("changed"))
            if data.get("task_action") in _DEBUG:
                self._note(data.get("res") or {})
        elif kind == "runner_on_skipped":
            self._finish(host)
        elif kind == "runner_on_failed":
            self._finish(host)
            if not data.get("ignore_errors"):
                result = data.get("res") or {}
                retried = isinstance(result, dict) and bool(result.get("attempts"))
                self.failures.append(Failure(host, data.get("task", ""), message(result), retried=retried))
        elif kind == "runner_on_unreachable":
            self._finish(host)
            self.failures.append(Failure(host, data.get("task", ""), message(data.get("res")), True))
        elif kind == "playbook_on_stats":
            lost = set(data.get("failures") or {}) | set(data.get("dark") or {})
            # A task that failed and was rescued is no failure of the playbook.
            kept = [failure for failure in self.failures if failure.host in lost]
            # If a task gives no reason, the rescue that follows it explains the failure.
            self.failures = [failure for failure in kept if failure.message != NO_REASON] or kept

    @property
    def waiting(self) -> list[str]:
        """The hosts that have not finished the current task, sorted."""
        return sorted(self._waiting)

    def _finish(self, host: str) -> None:
        self._waiting.discard(host)
        self.retries.pop(host, None)

    def _note(self, result: dict[str, Any]) -> None:
        for item in result.get("results") or []:
            self._note(item)
        if "results" in result:
            return
        text = result.get("msg")
        text = "\n".join(str(line) for line in text) if isinstance(text, list) else text
        if isinstance(text, str) and text.strip() and text not in self.notes:
            self.notes.append(text)


def message(result: object) -> str:
    """The message of a failed task with its output, as plain text.

    result: the result of the task in an event of ansible-runner, a dict with msg, stderr, stdout or results
    (of the items of a loop).
    """
    if not isinstance(result, dict):
        return str(result or NO_REASON)
    if result.get("censored"):
        return str(result["censored"])
    failed_items = [
        item for item in result.get("results") or [] if isinstance(item, dict) and item.get("failed")
    ]
    if failed_items:
        return "\n".join(
            f"{item.get('_ansible_item_label', item.get('item', ''))}: {message(item)}"
            for item in failed_items
        )
    text = result.get("msg", "")
    parts = ["\n".join(map(str, text)) if isinstance(text, list) else str(text).strip()]
    for key in ("stderr", "stdout", "module_stderr", "module_stdout"):
        output = str(result.get(key) or "").strip()
        if output and output not in parts[0]:
            parts.append(output)
    return "\n".join(part for part in parts if part) or NO_REASON


class CancelledError(Exception):
    """Raised after Ctrl-C, once the playbook or command has ended."""


def log_of(name: str) -> Path:
    """The path of the log of the stage `name`. The folder of the log is created if it is missing."""
    (CACHE / "logs").mkdir(parents=True, exist_ok=True)
    return CACHE / "logs" / f"{name}.log"


@dataclass
class Job:
    """One run of a playbook of the repository, or of one module on hosts.

    name: name of the stage and its log.
    playbook: file name of the playbook; None if the job runs a module.
    module, module_args, pattern: name and arguments of the module, and the hosts on which it runs; None if
        the job runs a playbook.
    inventory: path of the inventory; None: that of inventory.usual.
    args: options of ansible-playbook or ansible, as typed.
    become_password: password for sudo; None if sudo needs no password.
    stage: the progress. rc: the exit status; None before the end. seconds: duration of the job.
    """

    name: str
    playbook: str | None = None
    module: str | None = None
    module_args: str | None = None
    pattern: str | None = None
    inventory: str | None = None
    args: list[str] = field(default_factory=list)
    become_password: str | None = None
    stage: Stage = field(init=False)
    rc: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.stage = Stage(self.name)

    @property
    def log(self) -> Path:
        """The path of the file with the whole output of the last job that had this name."""
        return log_of(self.name)

    def follow(self, tick: Callable[[], None], on_event: Callable[[Event], None] | None = None) -> bool:
        """Run the job to its end. Returns True if every host succeeded.

        tick: called several times a second. on_event: called with each event of ansible-runner. Raises
        CancelledError if Ctrl-C has ended the job.
        """
        started = time.monotonic()
        try:
            with contextlib.closing(self._events()) as events:
                for event in events:
                    if event is not None:
                        self.stage.fold(event)
                        if on_event:
                            on_event(event)
                    tick()
        except KeyboardInterrupt:
            raise CancelledError from None
        finally:
            self.seconds = time.monotonic() - started
        return self.rc == 0

    def _events(self) -> Generator[Event | None]:
        """Run the job and yield its events; None if none has arrived for 0.1 s."""
        self.log.unlink(missing_ok=True)
        events: queue.Queue[Event] = queue.Queue()
        kill = threading.Event()

        def receive(event: Event) -> bool:
            events.put(event)
            return False  # ansible-runner need not keep a file for each event

        with tempfile.TemporaryDirectory(prefix="nanofleet-") as private:
            arguments = [*self.args, "--ask-become-pass"] if self.become_password else self.args
            runner = ansible_runner.interface.init_runner(
                private_data_dir=private,
                project_dir=str(ROOT),
                playbook=self.playbook,
                module=self.module,
                module_args=self.module_args,
                host_pattern=self.pattern,
                inventory=self.inventory,
                cmdline=shlex.join(arguments) or None,
                envvars=environment(),
                passwords={r"BECOME password.*:\s*$": self.become_password} if self.become_password else None,
                settings={"pexpect_timeout": 1},
                suppress_env_files=True,  # a password never reaches the disk
                event_handler=receive,
                cancel_callback=kill.is_set,
                quiet=True,
            )
            thread = threading.Thread(target=runner.run, daemon=True)
            thread.start()
            try:
                while thread.is_alive() or not events.empty():
                    try:
                        yield events.get(timeout=0.1)
                    except queue.Empty:
                        yield None
            except BaseException:  # Ctrl-C here, or the consumer has closed this generator
                self._cancel(thread, kill)
                raise
            finally:
                if (stdout := Path(runner.config.artifact_dir) / "stdout").exists():
                    shutil.copyfile(stdout, self.log)
            self.rc = runner.rc if runner.rc is not None else 1

    def _cancel(self, thread: threading.Thread, kill: threading.Event) -> None:
        """End the playbook with SIGINT, or by force after _CANCEL_SECONDS or a second Ctrl-C."""
        deadline = time.monotonic() + _CANCEL_SECONDS
        if self.stage.pid and thread.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.stage.pid, signal.SIGINT)
        else:
            kill.set()
        while thread.is_alive():
            try:
                thread.join(0.2)
            except KeyboardInterrupt:
                kill.set()
            if time.monotonic() > deadline:
                kill.set()


def environment() -> dict[str, str]:
    """Environment variables for a subprocess that runs Ansible with the ansible.cfg of this checkout.

    They are those of this process; PATH begins with the folder of this Python.
    """
    venv_bin = str(Path(sys.executable).parent)
    given = os.environ.get("ANSIBLE_INVENTORY", "")
    # A relative path would not be found: ansible-runner runs a module in a folder of its own.
    paths = [str(Path(each).absolute()) if Path(each).exists() else each for each in given.split(",")]
    return {
        **os.environ,
        **({"ANSIBLE_INVENTORY": ",".join(paths)} if given else {}),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        # By default ansible-runner disables host-key checking.
        "ANSIBLE_HOST_KEY_CHECKING": os.environ.get("ANSIBLE_HOST_KEY_CHECKING", "True"),
        "PATH": venv_bin + os.pathsep + os.environ.get("PATH", os.defpath),
    }
