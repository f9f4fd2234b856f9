"""A resumable HTTP download of one file: `Transfer(url, path, shared).run()`.

The content is written to `path`, the metadata of the response to `path`.json. After a failure, and in a later
process, a transfer continues where it stopped (Range and If-Range). Pauses between tries grow. If the server
ignores Range, the whole file is downloaded again.
"""

import contextlib
import email.utils
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.data import DataError
from trainer.data.files import sync_file, write_json
from trainer.data.progress import Progress

TRIES = 6  # consecutive ones without a byte
FIRST_PAUSE = 1.0  # seconds; doubled after each try
LONGEST_PAUSE = 60.0
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 2**18
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class StoppedError(Exception):
    """Raised in a transfer that was stopped: another transfer failed, or a person pressed Ctrl-C."""


class InterruptedTransferError(Exception):
    """Raised if a request failed or a response ended early, so that another try may succeed.

    reason: what has failed. pause: the number of seconds that the server asks to wait before the next try.
    """

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class SharedState:
    """State that concurrent downloads share.

    progress: counts the bytes of all downloads. n_files: the number of files.
    stop: an event; setting it stops all downloads.
    sizes: {URL: size of the file in bytes}, for the files whose size is known.
    unverified: names of the files that were downloaded and whose sha256 is not known.
    """

    def __init__(self, progress: Progress, n_files: int = 1) -> None:
        self.progress = progress
        self.n_files = n_files
        self.stop = threading.Event()
        self.sizes: dict[str, int] = {}
        self.unverified: list[str] = []  # files without a known sha256

    def set_size(self, url: str, size: int) -> None:
        """Set the size in bytes of the file at `url`, and estimate the total size.

        Files of unknown size count with the mean of the known sizes.
        """
        self.sizes[url] = size
        self.progress.total = sum(self.sizes.values()) * self.n_files // len(self.sizes)


class Retries:
    """Counts the consecutive failures of the download of `url`, and sleeps between the tries.

    shared: the state of all downloads, whose event `stop` ends a sleep.
    """

    def __init__(self, url: str, shared: SharedState) -> None:
        self.url, self.shared = url, shared
        self.reset()

    def reset(self) -> None:
        """Reset the count and the pause. Call this after a try that has received bytes."""
        self.failures, self.pause = 0, FIRST_PAUSE

    def failed(self, error: InterruptedTransferError) -> None:
        """Count a failure, print it and sleep. Raises DataError after `TRIES` failures in a row.

        Raises StoppedError if the download is stopped during the sleep.
        """
        self.failures += 1
        if self.failures == TRIES:
            raise DataError(
                f"{self.url} cannot be downloaded: {error}, {TRIES} times in a row. Check the network and "
                "the URL and type the same again; the bytes received so far are kept."
            )
        pause = min(max(self.pause, error.pause), LONGEST_PAUSE)
        self.shared.progress.note(f"{self.url}: {error}; next try in {pause:g} s")
        self.pause *= 2
        if self.shared.stop.wait(pause):
            raise StoppedError


@dataclass
class RemoteFile:
    """The metadata of a file, from the first response of the server.

    url: the URL of the file.
    validator: ETag or Last-Modified, to verify that later responses are of the same file; "" if unknown.
    size: the size in bytes; -1 if unknown.
    sha256: 64 hex digits; "" if unknown.
    """

    url: str
    validator: str = ""
    size: int = -1
    sha256: str = ""


class Transfer:
    """A download of the file at `url` to `path`. A partial file of an earlier process is continued."""

    def __init__(
        self, url: str, path: Path, shared: SharedState, advice: str = "Check --base-url and --count."
    ) -> None:
        """Read the metadata of a partial file, if there is one.

        url: the URL of the file. path: where the file is written. shared: the state of all downloads. advice:
        the remedy that the message about an HTTP error, such as 404, shows.
        """
        self.path, self.shared, self.advice = path, shared, advice
        self.metadata_path = path.with_name(f"{path.name}.json")
        self.remote = self._read_metadata(url)
        self.shared.progress.add_existing(self.received)

    @property
    def received(self) -> int:
        """The number of bytes in the file at `path`; 0 if the file does not exist."""
        return self.path.stat().st_size if self.path.exists() else 0

    def run(self) -> RemoteFile:
        """Send requests until the file is complete; returns its metadata.

        Raises DataError if the download fails or the file cannot be written, StoppedError if the download is
        stopped.
        """
        retries = Retries(self.remote.url, self.shared)
        while self.remote.size < 0 or self.received != self.remote.size:
            before = self.received
            try:
                self._request()
                break
            except InterruptedTransferError as error:
                if self.received > before:
                    retries.reset()
                retries.failed(error)
            except urllib.error.HTTPError as error:
                if error.code == 416 and before:
                    self.discard()
                    continue
                raise DataError(
                    f"{self.remote.url} cannot be downloaded: the server answers {error.code} "
                    f"{error.reason}. {self.advice}"
                ) from None
            except OSError as error:
                raise DataError(
                    f"Cannot write {self.path}: {error.strerror or error}. Fix that and type the same "
                    "again; the bytes received so far are kept."
                ) from None
        return self.remote

    def discard(self) -> None:
        """Delete the partial file and its metadata; the next request starts from the first byte."""
        self.shared.progress.add(-self.received)
        self.path.unlink(missing_ok=True)
        self.metadata_path.unlink(missing_ok=True)
        self.remote = RemoteFile(self.remote.url)

    def _read_metadata(self, url: str) -> RemoteFile:
        """The stored metadata of the partial file if it is of `url`; otherwise the partial file is deleted.

        A partial file that is larger than the remote file is deleted too.
        """
        try:
            remote = RemoteFile(**json.loads(self.metadata_path.read_bytes()))
        except (OSError, ValueError, TypeError):
            remote = RemoteFile("")
        if remote.url != url or self.received > remote.size >= 0:
            self.path.unlink(missing_ok=True)
            remote = RemoteFile(url)
        return remote

    def _request(self) -> None:
        received = self.received
        headers = {"Range": f"bytes={received}-"} if received else {}
        if received and self.remote.validator:
            headers["If-Range"] = self.remote.validator
        response, linked_sha256 = open_url(self.remote.url, headers)
        with response:
            start = self._start(response, received)
            length = response.headers.get("Content-Length") or ""
            end = start + int(length) if length.isdigit() else -1
            if not start:
                self.shared.progress.add(-received)
                self.remote = RemoteFile(self.remote.url, _validator(response.headers), end, linked_sha256)
                write_json(self.metadata_path, asdict(self.remote))
            if self.remote.size >= 0:
                self.shared.set_size(self.remote.url, self.remote.size)
            self._copy(response, "ab" if start else "wb")
        if 0 <= end != self.received:
            raise InterruptedTransferError(f"the response ended after {self.received:,} of {end:,} bytes")

    def _start(self, response: Any, received: int) -> int:
        """The offset at which the response starts: `received` if it continues the same file, else 0.

        Raises InterruptedTransferError, and deletes the partial file, if the file has changed on the server.
        """
        if response.status != 206:
            return 0
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
        same = found and int(found[1]) == received and found[2] in ("*", str(self.remote.size))
        if not same or _validator(response.headers) not in ("", self.remote.validator):
            self.discard()
            raise InterruptedTransferError("the file has changed on the server")
        return received

    def _copy(self, response: Any, mode: str) -> None:
        with open(self.path, mode, buffering=0) as file:
            while True:
                try:
                    block = response.read1(BLOCK)
                except (OSError, http.client.HTTPException) as error:
                    raise InterruptedTransferError(_reason(error)) from None
                if not block:
                    break
                rest = memoryview(block)
                while rest:  # a write to a nearly full disk may be partial
                    rest = rest[file.write(rest) :]
                self.shared.progress.add(len(block))
                if self.shared.stop.is_set():
                    raise StoppedError
            sync_file(file)


def open_url(url: str, headers: Mapping[str, str]) -> tuple[Any, str]:
    """Send a GET request; returns (response, sha256 of the file).

    The sha256 is the one that a model hub sends in X-Linked-ETag; "" if there is none. headers: more headers
    of the request. Raises InterruptedTransferError if the failure may be temporary, else urllib's HTTPError.
    """
    redirects = _Redirects()
    request = urllib.request.Request(
        url, headers={"User-Agent": "nanofleet", "Accept-Encoding": "identity", **headers}
    )
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code in TRANSIENT:
            reason = f"the server answers {error.code} {error.reason}"
            raise InterruptedTransferError(reason, _retry_after(error.headers)) from None
        raise
    except (OSError, http.client.HTTPException) as error:
        raise InterruptedTransferError(_reason(error)) from None
    return response, redirects.linked_sha256 or _linked_sha256(response.headers)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the sha256 that a model hub sends with the redirect."""

    linked_sha256 = ""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.linked_sha256 = self.linked_sha256 or _linked_sha256(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _linked_sha256(headers: Any) -> str:
    found = re.fullmatch(r'"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag") or "")
    return found[1] if found else ""


def _validator(headers: Any) -> str:
    """The strong ETag, else Last-Modified, else "": identifies a version of the file (If-Range)."""
    etag = headers.get("ETag") or ""
    return str(etag if etag and not etag.startswith("W/") else headers.get("Last-Modified") or "")


def _retry_after(headers: Any) -> float:
    value = headers.get("Retry-After") or ""
    if value.isdigit():
        return float(value)
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _reason(error: BaseException) -> str:
    """The cause of a failed connection in a few words, such as "no byte in 30 s"."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"no byte in {TIMEOUT:g} s"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was lost"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
