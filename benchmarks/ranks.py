"""Starts the ranks of a run on this machine, one thread each, for the benchmarks."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def argument_parser(text: str | None, out: str) -> argparse.ArgumentParser:
    """A parser of the arguments of a benchmark, with the options --data-dir and --out.

    text: the docstring of the benchmark. out: what the benchmark writes to the folder --out.
    """
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="the output of prepare")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    return parser


def start(
    ranks: int, data_dir: Path, run_dir: Path, settings: Mapping[str, object]
) -> subprocess.Popen[bytes]:
    """Start torchrun with `ranks` ranks on this machine; its output is appended to RUN_DIR.log.

    settings: {name: value}; each becomes an option --NAME VALUE of `python -m trainer train`.
    """
    arguments = ["train", "--data-dir", str(data_dir.resolve()), "--run-dir", str(run_dir.resolve())]
    arguments += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    with open(f"{run_dir}.log", "ab") as log:
        return torchrun(ranks, arguments, stdout=log, stderr=log)


def torchrun(ranks: int, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start `python -m trainer ARGUMENTS` with `ranks` ranks over loopback.

    streams: the arguments stdout and stderr of subprocess.Popen.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=0",
        "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "trainer", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
