"""How an attempt at a run ended, in a sentence: outcome.json in the run directory, and the exit code.

finished   every step was done
stopped    somebody asked for it
retryable  trying again can help: a peer left, the store did not answer
final      trying again cannot help: bad input, a loss that is not a number, ranks that disagree

`settled` is whether nobody wants another attempt. A host that shuts down ends its ranks by SIGTERM, unasked,
so what that stopped is not.
"""

from __future__ import annotations

import signal
import traceback
from pathlib import Path

from trainer.config import ConfigError
from trainer.data import DataError, RowsChangedError
from trainer.data.files import is_full
from trainer.host.memory import is_out_of_memory

EXIT_CODES = {"finished": 0, "stopped": 0, "retryable": 75, "final": 1}
BAD_INPUT_EXIT_CODE = 2


class RunEnd(Exception):  # noqa: N818 - an end, not always an error
    """Ends the attempt with a sentence for its outcome; `detail`, lines under it, goes to the log alone."""

    outcome = "final"

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


class Final(RunEnd):
    """Trying again cannot help."""


class LeftToOne(Final):
    """Not for these ranks: `host` would by itself be faster. The outcome has it as `alone`.

    seconds: of a step there, together: of one on all ranks; said: the table by which it was decided.
    """

    def __init__(self, sentence: str, host: str, seconds: float, together: float, said: str) -> None:
        super().__init__(sentence, said)
        self.alone = {"host": host, "seconds": seconds, "together": together, "said": said}


class Retryable(RunEnd):
    """Trying again can help."""

    outcome = "retryable"


class Stopped(RunEnd):
    """Somebody asked for the end."""

    outcome = "stopped"


def conclude(error: BaseException) -> tuple[str, str, int]:
    """The outcome, its sentence and the exit code that an exception stands for."""
    if isinstance(error, RunEnd):
        return error.outcome, str(error), EXIT_CODES[error.outcome]
    if isinstance(error, RowsChangedError):
        return "retryable", str(error), EXIT_CODES["retryable"]
    if isinstance(error, ConfigError | DataError):
        return "final", str(error), BAD_INPUT_EXIT_CODE
    if isinstance(error, KeyboardInterrupt):
        reason = (
            "Interrupted from the keyboard; nothing was saved since the last checkpoint (a file named stop "
            "in the run directory ends a run with one)."
        )
        return "stopped", reason, 128 + signal.SIGINT
    if is_full(error):
        place = getattr(error, "filename", None) or "the run directory"
        return "final", f"No space is left on the disk of {place}.", EXIT_CODES["final"]
    if is_out_of_memory(error):
        return (
            "final",
            "The host has too little memory for this run; lower depth, sequence_len or device_batch_size.",
            1,
        )
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" in {Path(last[0].filename).name}, line {last[0].lineno}" if last else ""
    return "final", f"Unexpected {type(error).__name__}{where}: {error} (the log has the traceback).", 1


def is_expected(error: BaseException) -> bool:
    """Whether a sentence says it all, so that a traceback would only hide it."""
    return not isinstance(error, Exception) or not conclude(error)[1].startswith("Unexpected ")
