"""The outcomes of an attempt at a run: exceptions that set an outcome, and the exit code of each outcome.

finished   all steps are done
stopped    a person stopped the run
retryable  a restart can help: a peer is lost, the rendezvous store did not answer
final      a restart cannot help: bad input, a loss that is not finite, ranks that differ

The key `settled` of outcome.json is true if no attempt follows. A rank that SIGTERM has stopped, as at a
shutdown of its host, writes false.
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
    """Raised to end the attempt, with an outcome that the subclass sets.

    sentence: the reason, which outcome.json gets. detail: further text, which is only logged.
    """

    outcome = "final"

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


class Final(RunEnd):
    """Ends the attempt with the outcome `final`: a restart cannot help."""


class TransferToHost(Final):
    """Ends the attempt on all ranks because the GPU of one host is faster than all ranks together.

    sentence: the reason. host: the host with this GPU. seconds: predicted seconds of a step on this GPU.
    together: predicted seconds of a step on all ranks. table: the predictions as text. outcome.json gets
    `transfer`, an object with host, seconds, together and table.
    """

    def __init__(self, sentence: str, host: str, seconds: float, together: float, table: str) -> None:
        super().__init__(sentence, table)
        self.transfer = {"host": host, "seconds": seconds, "together": together, "table": table}


class Retryable(RunEnd):
    """Ends the attempt with the outcome `retryable`: a restart can help."""

    outcome = "retryable"


class Stopped(RunEnd):
    """Ends the attempt with the outcome `stopped`: a person stopped the run."""

    outcome = "stopped"


def conclude(error: BaseException) -> tuple[str, str, int]:
    """Conclude from `error` how the attempt has ended.

    Returns (outcome, reason, exit code). outcome: stopped, retryable or final. reason: a sentence.
    """
    if isinstance(error, RunEnd):
        return error.outcome, str(error), EXIT_CODES[error.outcome]
    if isinstance(error, RowsChangedError):
        return "retryable", str(error), EXIT_CODES["retryable"]
    if isinstance(error, ConfigError | DataError):
        return "final", str(error), BAD_INPUT_EXIT_CODE
    if isinstance(error, KeyboardInterrupt):
        reason = (
            "Interrupted from the keyboard. The steps since the last checkpoint are lost. To end a run with "
            "a checkpoint, create a file named stop in its run directory instead."
        )
        return "stopped", reason, 128 + signal.SIGINT
    if is_full(error):
        where = getattr(error, "filename", None) or "the run directory"
        reason = f"No space is left on the disk of {where}. Remove files there, then start the run again."
        return "final", reason, EXIT_CODES["final"]
    if is_out_of_memory(error):
        reason = (
            "The memory of this host, or of its GPU, is too small for this run. To resume the run with less, "
            "set device_batch_size to 1 and recompute to layers: with the playbooks -e device_batch_size=1 "
            "-e recompute=layers (and set fleet_device_batch_size of the host, if the inventory has it, to "
            "1), by hand --device-batch-size 1 --recompute layers. If that is not enough, start a new run "
            "with a smaller depth or sequence_len."
        )
        return "final", reason, EXIT_CODES["final"]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" in {Path(last[0].filename).name}, line {last[0].lineno}" if last else ""
    return "final", f"Unexpected {type(error).__name__}{where}: {error} (the log has the traceback).", 1


def is_expected(error: BaseException) -> bool:
    """Whether `error` is a known cause of the end of an attempt, so that no traceback is logged.

    The reason from `conclude` then explains the error.
    """
    return not isinstance(error, Exception) or not conclude(error)[1].startswith("Unexpected ")
