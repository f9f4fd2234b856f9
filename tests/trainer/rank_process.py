"""Rank processes for the tests that train: forks of a server that has imported torch and the trainer.

`python -m trainer` imports them for about 2 s of CPU time, which is most of the time of a short run. The fork
server imports them once for each process of pytest, and computes nothing, so that its forks may compute.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
# pytest: a child of a fork server imports the main module of its parent again.
IMPORTED = ["pytest", "trainer.__main__", "trainer.train", "trainer.elastic.train"]
CONTEXT = multiprocessing.get_context("forkserver")


class RankProcess:
    """A process of `python -m trainer` or faulty.py, with the methods of subprocess.Popen that tests use.

    fault: arguments of faulty.py before those of the trainer; empty: no fault. arguments: of the trainer.
    environment: all its variables; Python and the imported packages have read their own ones earlier. log:
    path of the file to which its output is appended.
    """

    def __init__(
        self, fault: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)):
            CONTEXT.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
        log.touch()
        self._log = log
        values = list(fault), list(arguments), dict(environment), str(log)
        self._process = CONTEXT.Process(target=run, args=values, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._log), timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._log.read_text(encoding="utf-8", errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run(fault: list[str], arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Run the trainer in this process, a fork of the server, and end the process."""
    multiprocessing.set_start_method("fork", force=True)  # the default of a process that a person starts
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    from faulty import plant

    from trainer.__main__ import flush_streams, main

    if fault:
        plant(fault[0], int(fault[1]), float(fault[2]))
    code = main(arguments)
    flush_streams()
    os._exit(code)
