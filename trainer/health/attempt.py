"""One attempt at a run on this rank: its files, its end by a signal, its exit code.

    code = run_attempt(run_dir, place, say, make, start)

Whatever ends the attempt, outcome.json says how. The first end counts; later ones change nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError, RunFile
from trainer.data.files import try_lock, write_whole
from trainer.health import restart_policy
from trainer.host.logger import Voice, set_up_streams
from trainer.host.rank_env import Place
from trainer.outcome import BAD_INPUT_EXIT_CODE, EXIT_CODES, Retryable, RunEnd, Stopped, conclude, is_expected

ENDING_SECONDS = 5.0  # for the attempt before to be gone
PARENT_SECONDS = 0.5
# For a checkpoint that is being written when SIGTERM comes: torchrun kills its ranks after 30 s.
SIGTERM_WRITE_SECONDS = 20.0
RESERVE_BYTES = 2**15  # held on the disk, so that there is room for the outcome when it is full


class Attempt:
    """One attempt at a run on this rank: gathers its figures and writes its outcome once."""

    def __init__(self, run_dir: Path, place: Place) -> None:
        name = "outcome.json" if place.speaks_for_host else f"outcome-{place.rank}.json"
        self.path = run_dir / name
        self._reserve = run_dir / f".{name}.reserve"
        self._place = place
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._ended = False
        self._held: IO[str] | None = None  # open as long as this attempt is
        self._at_end: list[Callable[[str, bool], None]] = []
        self.reason = ""  # once it has ended
        # Called before the process ends from another thread than the one that trains: completes a checkpoint
        # that is being written, within so many seconds, and returns how the attempt ends then.
        self.before_end: Callable[[RunEnd, float], RunEnd] = lambda end, seconds: end
        self._figures: dict[str, Any] = {
            "run_id": None,
            "step": 0,
            "num_iterations": None,
            "first_loss": None,
            "loss": None,
            "val_bpb": None,
            "checkpoint": None,
            "sample": None,
            "tok_per_s": None,
            "alone": None,
        }

    def begin(self, seconds: float = ENDING_SECONDS) -> None:
        """Make the run directory, take it for this rank, and take the outcome of an earlier attempt away.

        Raises ConfigError where that cannot be, or another process still is this rank after `seconds`.
        """
        lock = self.path.parent / f".rank-{self._place.rank}.lock"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held = try_lock(lock, seconds)
            if self._held is None:
                raise ConfigError(
                    f"Another process{_named(lock)} trains as rank {self._place.rank} in "
                    f"{self.path.parent}. End it, or give another --run-dir."
                )
            self._forget_the_one_before()
            self._reserve.write_bytes(bytes(RESERVE_BYTES))
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.path.parent} cannot be used: {error.strerror}."
            ) from None

    def _forget_the_one_before(self) -> None:
        """Keep a line on how it ended; its outcome goes, and those of ranks this host no longer has."""
        if self._place.speaks_for_host:
            restart_policy.begin(self.path.parent)
            first = self._place.rank
            mine = {f"outcome-{rank}.json" for rank in range(first, first + self._place.local_world_size)}
            for path in self.path.parent.glob("outcome-*.json"):
                if path.name not in mine:
                    path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def state(self, **figures: Any) -> None:
        """Set figures of the outcome: step, loss, val_bpb, checkpoint ..."""
        unknown = figures.keys() - self._figures.keys()
        if unknown:
            raise ValueError(f"an outcome has no {', '.join(sorted(unknown))}")
        self._figures.update(figures)

    def at_end(self, call: Callable[[str, bool], None]) -> None:
        """Call `call` with the outcome, and whether there is a hurry, when the attempt ends."""
        self._at_end.append(call)

    @property
    def step(self) -> int:
        return int(self._figures["step"])

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint is that of the newest step."""
        return str(self._figures["checkpoint"]).endswith(f"step_{self.step:06d}")

    def end(self, outcome: str, reason: str, hurry: bool = False, settled: bool | None = None) -> bool:
        """Write the outcome; only the first end of an attempt counts. Returns whether this was it."""
        with self._lock:
            if self._ended:
                return False
            self._ended, self.reason = True, reason
            content = {
                **self._figures,
                "outcome": outcome,
                "reason": reason,
                "settled": outcome in restart_policy.SETTLED if settled is None else settled,
                "rank": self._place.rank,
                "seconds": round(time.monotonic() - self._started, 3),
                "time": time.time(),
            }
            try:
                self._reserve.unlink(missing_ok=True)
                write_whole(self.path, (json.dumps(content, indent=1) + "\n").encode())
                if self._place.speaks_for_host:
                    restart_policy.end(self.path.parent, content)
            except OSError as error:
                print(f"{self.path} cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
        # Outside the lock: a SIGTERM while one of these takes its time must not have to wait for it.
        for call in self._at_end:
            call(outcome, hurry)
        if self._held is not None:
            self._held.close()
        return True


def run_attempt(
    run_dir: Path,
    place: Place,
    say: Voice,
    make: Callable[[], RunFile],
    start: Callable[[RunFile, Attempt, Voice], str],
) -> int:
    """Make the run file, start what it describes, write the outcome; returns the exit code."""
    set_up_streams()
    attempt = Attempt(run_dir, place)
    try:
        attempt.begin()
    except ConfigError as error:  # the outcome in the directory, if there is one, is another's
        say.ended("final", str(error))
        return BAD_INPUT_EXIT_CODE
    heed_sigterm(attempt, say)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        heed_torchrun(attempt, say)
    try:
        reason = start(make(), attempt, say)
        outcome, code, detail = "finished", EXIT_CODES["finished"], ""
    except BaseException as error:
        if not is_expected(error):
            say.failure(error)
        outcome, reason, code = conclude(error)
        detail = getattr(error, "detail", "")
    if attempt.end(outcome, reason):
        say.ended(outcome, reason, detail)
    else:  # another thread has written another outcome, and ends the process with its exit code
        time.sleep(ENDING_SECONDS)
    return code


def _named(lock: Path) -> str:
    """Who holds the lock, as it has written there itself."""
    pid = lock.read_text(encoding="utf-8").strip()
    return f" (PID {pid})" if pid else ""


def heed_torchrun(attempt: Attempt, say: Voice) -> None:
    """From now on this rank ends when torchrun, which started it, is gone: SIGKILL leaves it no farewell."""
    torchrun = os.getppid()

    def watch() -> None:
        while os.getppid() == torchrun:
            time.sleep(PARENT_SECONDS)
        reason = f"torchrun, which started this rank, is gone after step {attempt.step}."
        attempt.before_end(Retryable(reason), math.inf)
        if attempt.end("retryable", reason, hurry=True):
            say.ended("retryable", reason)
        os._exit(EXIT_CODES["retryable"])

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


def heed_sigterm(attempt: Attempt, say: Voice) -> None:
    """From now on SIGTERM writes an outcome and ends the process, even in the middle of a collective.

    A thread waits for the signal, because a Python handler would run only after the collective returns. Call
    it before other threads start: they inherit the blocked signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        by_parent = _await_sigterm()
        attempt.before_end(_terminated(by_parent, attempt), SIGTERM_WRITE_SECONDS)
        end = _terminated(by_parent, attempt)  # it names the checkpoint
        if attempt.end(end.outcome, str(end), hurry=True, settled=False):
            say.ended(end.outcome, str(end))
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def _await_sigterm() -> bool:
    """Wait for SIGTERM; returns whether the parent sent it, or may have where the system does not tell."""
    if sys.platform == "darwin" or not hasattr(signal, "sigwaitinfo"):
        signal.sigwait({signal.SIGTERM})
        return True
    return signal.sigwaitinfo({signal.SIGTERM}).si_pid == os.getppid()


def _terminated(by_parent: bool, attempt: Attempt) -> RunEnd:
    """torchrun also sends SIGTERM to the ranks left on its host when one of them has died."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if by_parent and local_world_size > 1:
        return Retryable(
            f"torchrun ended this rank after step {attempt.step}: another rank of this host has died."
        )
    asked = f"Asked to end by SIGTERM after step {attempt.step}"
    if attempt.is_saved:
        return Stopped(f"{asked}, whose checkpoint is written.")
    return Stopped(f"{asked}; nothing was saved since the last checkpoint.")
