"""Runs the HTTP server until SIGTERM or Ctrl-C.

python -m trainer serve --run-dir runs/mine --follow --host 0.0.0.0 --port 8000 --api-key-file key
"""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from trainer.chat.loaded import load, load_from, newest_in
from trainer.config import ConfigError
from trainer.data import DataError
from trainer.host.memory import is_out_of_memory
from trainer.serve.app import make_app
from trainer.serve.scheduler import Scheduler

FOLLOW_SECONDS = 5.0
GRACE_SECONDS = 10  # for answers that are in progress at SIGTERM


class CheckpointFollower(threading.Thread):
    """A thread that loads each new checkpoint of a run while the server answers.

    scheduler: the scheduler that answers with each new model. run_dir: the run directory. dtype: format of
    the weights, as for `set_format`. seconds: time between two checks for a new checkpoint. A checkpoint that
    cannot be loaded is reported once and skipped.
    """

    def __init__(
        self, scheduler: Scheduler, run_dir: Path, dtype: str, seconds: float = FOLLOW_SECONDS
    ) -> None:
        super().__init__(name="follower", daemon=True)
        self.scheduler, self.run_dir, self.dtype, self.seconds = scheduler, run_dir, dtype, seconds
        self.seen = scheduler.loaded.checkpoint
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.seconds):
            self.look()

    def look(self) -> None:
        """Check the run directory for a new checkpoint, and load the checkpoint if there is one."""
        try:
            newest = newest_in(self.run_dir)
            if newest == self.seen:
                return
            self.seen = newest
            loaded = load(newest, self.dtype)
        except (ConfigError, DataError, OSError, RuntimeError, MemoryError) as error:
            reason = str(error)
            if is_out_of_memory(error):
                reason = f"This host has too little memory to load {self.seen.name} beside the present model."
            print(f"{reason} Step {self.scheduler.loaded.step} keeps answering.", file=sys.stderr, flush=True)
            return
        self.scheduler.replace(loaded)
        print(f"Answering with {loaded.name}.", file=sys.stderr, flush=True)


def read_key(path: Path | None) -> str:
    """The API key in the file `path`, without blanks at its ends; "" if `path` is None.

    Raises ConfigError if the file cannot be read or is empty.
    """
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            f"The API key file {path} cannot be read: {reason}. Check its path and permissions, or leave "
            "--api-key-file out."
        ) from None
    if not key:
        raise ConfigError(
            f"The API key file {path} is empty. Write a key to it, or leave --api-key-file out."
        )
    return key


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on a host and port.

    Raises ConfigError if the port is in use by another program or cannot be opened.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is in use by another program. Stop it, or choose another --port."
            ) from None
        raise ConfigError(f"Port {port} of {host} cannot be opened: {error.strerror}.") from None
    return found


def run(args: argparse.Namespace) -> int:
    """`serve`: answer requests until SIGTERM, then return the exit code 0. args: the parsed options.

    Raises ConfigError or DataError if an option is not valid or the model cannot be loaded.
    """
    if args.follow and args.run_dir is None:
        raise ConfigError("--follow needs --run-dir: a checkpoint alone does not change.")
    for name, least in (("queue", 0), ("batch", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} is {getattr(args, name)}: it must be at least {least}.")
    if not 0 <= args.port < 65_536:
        raise ConfigError(f"--port is {args.port}: it takes 1 to 65535, or 0 for a free one.")
    key = read_key(args.api_key_file)
    with listen(args.host, args.port) as sock:
        scheduler = Scheduler(load_from(args), args.batch, args.queue)
        scheduler.start()
        follower = CheckpointFollower(scheduler, args.run_dir, args.dtype) if args.follow else None
        if follower is not None:
            follower.start()
        port = sock.getsockname()[1]
        name = f"[{args.host}]" if ":" in args.host else args.host
        print(f"{scheduler.loaded.name} answers on http://{name}:{port}/", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            make_app(scheduler, key), log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS
        )
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at its end
        try:
            uvicorn.Server(config).run(sockets=[sock])
        finally:
            if follower is not None:
                follower.ended.set()
            scheduler.stop()
    return 0
