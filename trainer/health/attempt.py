"""One attempt at a run on this rank: its files, its end by a signal, its exit code.

    code = run_attempt(run_dir, env, log, make, start)

The first end of the attempt is written to its outcome file; later ends change nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from trainer.config import ConfigError
from trainer.data.files import try_lock, write_json
from trainer.health import attempt_history
from trainer.health.status_record import OutcomeRecord
from trainer.host.logger import RunLogger, set_up_streams
from trainer.host.rank_env import RankEnv
from trainer.outcome import BAD_INPUT_EXIT_CODE, EXIT_CODES, Retryable, RunEnd, Stopped, conclude, is_expected

Run = TypeVar("Run")
ENDING_SECONDS = 5.0  # for the process of the previous attempt to exit
PARENT_SECONDS = 0.5
# For a checkpoint that is being written at SIGTERM: torchrun kills its ranks after 30 s.
SIGTERM_WRITE_SECONDS = 20.0
RESERVE_BYTES = 2**15  # kept on the disk, so that a full disk has room for the outcome


class Attempt:
    """One attempt at a run on this rank: locks the run directory for this rank, writes its outcome file once.

    The outcome file is outcome.json for local rank 0, outcome-RANK.json for other local ranks.
    path: the outcome file.
    reason: why the attempt has ended; "" before its end.
    left: a sentence that the other hosts continue the run, if this rank has left an elastic run; else "".
    before_end: function that a thread other than the training thread calls as before_end(end, seconds) before
        it ends the process. The function waits at most `seconds` for a checkpoint that is being written, and
        returns the end of the attempt.
    """

    def __init__(self, run_dir: Path, env: RankEnv) -> None:
        name = "outcome.json" if env.is_host_leader else f"outcome-{env.rank}.json"
        self.path = run_dir / name
        self._reserve = run_dir / f".{name}.reserve"
        self._env = env
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._held: IO[str] | None = None  # open during the attempt
        self._at_end: list[Callable[[str, bool], None]] = []
        self.reason = ""  # once it has ended
        self.left = ""  # a sentence, if this rank has left an elastic run in order
        # Called before another thread than the training one ends the process: completes a checkpoint that is
        # being written, within these seconds, and returns the end of the attempt.
        self.before_end: Callable[[RunEnd, float], RunEnd] = lambda end, seconds: end
        self._figures = OutcomeRecord()

    def begin(self) -> None:
        """Create the run directory, lock it for this rank, and remove the outcome of an earlier attempt.

        Raises ConfigError if that fails, or if another process still trains as this rank after
        ENDING_SECONDS.
        """
        lock = self.path.parent / f".rank-{self._env.rank}.lock"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held = try_lock(lock, ENDING_SECONDS)
            if self._held is None:
                pid = lock.read_text(encoding="utf-8").strip()
                named = f" (PID {pid})" if pid else ""
                raise ConfigError(
                    f"Another process{named} trains as rank {self._env.rank} in "
                    f"{self.path.parent}. End it, or give another --run-dir."
                )
            if self._env.is_host_leader:
                attempt_history.begin(self.path.parent)
                first = self._env.rank
                mine = {f"outcome-{rank}.json" for rank in range(first, first + self._env.local_world_size)}
                for path in self.path.parent.glob("outcome-*.json"):
                    if path.name not in mine:  # of a rank that this host no longer has
                        path.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            self._reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.path.parent} cannot be used: {error.strerror}. Check its "
                "permissions and disk, or give another --run-dir."
            ) from None

    def begin_as(self, env: RankEnv) -> None:
        """Set the rank of this process after the hosts have elected a coordinator.

        env: the environment with that rank. Functions that were registered with `at_end` before are not
        called at the end.
        """
        self._env, self._at_end = env, []

    def update(self, **figures: Any) -> None:
        """Set figures for the outcome file, which `end` writes. figures: fields of OutcomeRecord."""
        self._figures = dataclasses.replace(self._figures, **figures)

    def at_end(self, call: Callable[[str, bool], None]) -> None:
        """Register a function that is called once, at the end of the attempt, as `call(outcome, hurry)`.

        outcome: finished, stopped, retryable or final. hurry: True if the process exits as soon as the
        functions have returned, as after SIGTERM: they should then wait as little as possible.
        """
        self._at_end.append(call)

    @property
    def step(self) -> int:
        """The number of completed steps that `update` has set; 0 before."""
        return self._figures.step

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint was written at the newest step."""
        return str(self._figures.checkpoint).endswith(f"step_{self.step:06d}")

    def end(self, outcome: str, reason: str, hurry: bool = False, settled: bool | None = None) -> bool:
        """Write the outcome file and call the functions of `at_end`, unless the attempt has ended already.

        Returns False if it has ended already. outcome: finished, stopped, retryable or final. reason: a
        sentence. hurry: whether the process is about to exit; passed to the functions of `at_end`. settled:
        True if no attempt follows. None stands for False if the outcome is retryable, else for True.
        """
        with self._lock:
            if self._ended:
                return False
            self._ended, self.reason = True, reason
            content = {
                **dataclasses.asdict(self._figures),
                "outcome": outcome,
                "reason": reason,
                "settled": outcome in attempt_history.SETTLED if settled is None else settled,
                "rank": self._env.rank,
                "seconds": round(time.monotonic() - self._started, 3),
                "time": time.time(),
            }
            try:
                self._reserve.unlink(missing_ok=True)
                write_json(self.path, content)
                if self._env.is_host_leader:
                    attempt_history.end(self.path.parent, content)
            except OSError as error:
                print(f"{self.path} cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
        # Outside the lock: SIGTERM must not wait for one of these calls.
        for call in self._at_end:
            call(outcome, hurry)
        if self._held is not None:
            self._held.close()
        return True

    def end_process(self, end: RunEnd, log: RunLogger) -> None:
        """End the attempt and this process. For threads other than the training thread.

        If the attempt has ended already, the process continues. end: outcome and reason, which are logged to
        `log`.
        """
        end = self.before_end(end, math.inf)
        if self.end(end.outcome, str(end), hurry=True):
            log.ended(end.outcome, str(end))
            os._exit(EXIT_CODES[end.outcome])


def run_attempt(
    run_dir: Path,
    env: RankEnv,
    log: RunLogger,
    make: Callable[[], Run],
    start: Callable[[Run, Attempt, RunLogger], str],
) -> int:
    """Run one attempt at a run on this rank and write its outcome file; returns the exit code.

    run_dir, env, log: of this rank. make: returns what `start` gets as its first argument, such as the
    content of the run file. start: called as start(run, attempt, log); trains to the end, and returns the
    reason for the outcome `finished`, a sentence. If `make` or `start` raises an exception, the outcome
    follows from that exception.
    """
    set_up_streams()
    attempt = Attempt(run_dir, env)
    try:
        attempt.begin()
    except ConfigError as error:  # an outcome in the directory belongs to another process
        log.ended("final", str(error))
        return BAD_INPUT_EXIT_CODE
    handle_sigterm(attempt, log)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        watch_torchrun(attempt, log)
    try:
        reason = start(make(), attempt, log)
        outcome, code, detail = "finished", EXIT_CODES["finished"], ""
    except BaseException as error:
        if not is_expected(error):
            log.failure(error)
        outcome, reason, code = conclude(error)
        detail = getattr(error, "detail", "")
    if attempt.end(outcome, reason):
        log.ended(outcome, reason, detail)
    else:  # another thread has written an outcome and ends the process with its exit code
        time.sleep(ENDING_SECONDS)
    return code


def watch_torchrun(attempt: Attempt, log: RunLogger) -> None:
    """Start a thread that ends this rank, as retryable, when its parent process torchrun has exited.

    The thread is needed because torchrun does not end its ranks when it is killed. attempt, log: of this
    rank.
    """
    torchrun = os.getppid()

    def watch() -> None:
        while os.getppid() == torchrun:
            time.sleep(PARENT_SECONDS)
        end = Retryable(
            "torchrun, which started this rank, has exited or was killed, so this rank ends too, after step "
            f"{attempt.step}. The unit of the run restarts by itself; by hand start torchrun again."
        )
        attempt.end_process(end, log)
        os._exit(EXIT_CODES["retryable"])

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


def handle_sigterm(attempt: Attempt, log: RunLogger) -> None:
    """Start a thread that, on SIGTERM, writes the outcome and ends the process, even during a collective.

    A Python signal handler would run only after the collective returns, so SIGTERM is blocked and the thread
    waits for it. Call this before other threads start: they inherit the blocked signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        if sys.platform == "darwin" or not hasattr(signal, "sigwaitinfo"):
            signal.sigwait({signal.SIGTERM})
            by_parent = True  # perhaps: this system does not report it
        else:
            by_parent = signal.sigwaitinfo({signal.SIGTERM}).si_pid == os.getppid()
        attempt.before_end(_terminated(by_parent, attempt), SIGTERM_WRITE_SECONDS)
        end = _terminated(by_parent, attempt)  # it names the checkpoint
        if attempt.end(end.outcome, str(end), hurry=True, settled=False):
            log.ended(end.outcome, str(end))
        else:  # the training thread has written its outcome, and ends the process with its exit code
            time.sleep(ENDING_SECONDS)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def _terminated(by_parent: bool, attempt: Attempt) -> RunEnd:
    """The end of an attempt by SIGTERM, which torchrun too sends to its ranks when one of them has died.

    by_parent: whether the parent process, perhaps torchrun, has sent the signal or may have sent it.
    """
    if by_parent and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return Retryable(
            f"torchrun ended this rank after step {attempt.step}: another rank of this host has died. The "
            "reason is in the log of that rank: ansible-playbook logs.yml"
        )
    asked = f"Asked to end by SIGTERM after step {attempt.step}"
    if attempt.left:
        return Stopped(f"{asked}. {attempt.left}")
    if attempt.is_saved:
        return Stopped(f"{asked}, whose checkpoint is written.")
    return Stopped(
        f"{asked}. The next start continues from the newest checkpoint, or from step 0 if there is none."
    )
