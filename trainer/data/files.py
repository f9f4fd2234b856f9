"""Atomic writes, digests of files, and file locks between the processes of a host."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from trainer.data import DataError

T = TypeVar("T")
# os.link fails with these on another file system, without support for links, or without permission.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def is_full(error: BaseException) -> bool:
    """Whether `error` is an OSError for a full disk or an exhausted disk quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            sync_file(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` as indented JSON, atomically."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def sync_file(file: IO[Any]) -> None:
    """Write the Python buffer of an open file, then the file itself, to the disk (fsync)."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the entries of `folder` to the disk (fsync). Only then does a rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path, count: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file as 64 hex digits.

    After each read, `count` is called with the number of bytes read.
    """
    digest = hashlib.sha256()
    block = bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
            if count:
                count(size)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path, count: Callable[[int], None] | None = None) -> bool:
    """Create `target` as a hard link to `source`, or as a copy if a link is not possible.

    Returns whether `target` is a link. `count` is called with the number of bytes of each copied block.
    """
    source = source.resolve()
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
    with open(source, "rb") as read, open(target, "wb") as written:
        while block := read.read(2**20):
            written.write(block)
            if count:
                count(len(block))
        sync_file(written)
    return False


def try_lock(path: Path, seconds: float) -> IO[str] | None:
    """Lock the file `path` and write the PID of this process to it; returns the open file, which is the lock.

    Returns None if another process still holds the lock after `seconds`. Closing the file, or the end of the
    process, releases the lock. Raises OSError if the file cannot be opened or written.
    """
    deadline = time.monotonic() + seconds
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - the caller keeps it open
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.1)
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`. If another process holds the lock, prints a line and waits.

    Raises DataError if the file cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise DataError(f"Cannot write to {path.parent}: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is writing to {path.parent}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_schema_1(path: Path, kind: str, out: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read the JSON file `path`, check that its schema is 1, and return `parse(content)`.

    kind: what the file is, such as "manifest", for messages. out: the value of --out in the command that the
    message about a missing file shows. Raises DataError if the file is missing, unreadable or damaged, or has
    another schema.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] == 1:
            return parse(content)
    except FileNotFoundError:
        raise DataError(
            f"There is no {path}. Make it with: python -m trainer prepare --source FOLDER --out {out} (text; "
            "for conversations: python -m trainer conversations; on the hosts of a fleet, setup.yml does it)"
        ) from None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{path} is not a {kind} of nanofleet, or it is damaged ({error}). Delete it and make it again "
            "with: python -m trainer prepare"
        ) from None
    raise DataError(
        f"{path} has schema {content['schema']}; this release reads schema 1. Use the release that wrote it, "
        "or make it again with: python -m trainer prepare"
    )
