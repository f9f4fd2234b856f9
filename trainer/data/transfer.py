"""One file over HTTP, resumed where it broke off: `Transfer(url, path, watch).run()`.

The bytes go to `path`, what the server said of them to a `.json` beside it. A transfer that breaks off is
taken up again after a growing pause, with Range and If-Range, by the next process too; a server that ignores
Range sends it all again.
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
from trainer.data.files import sync_file, write_whole
from trainer.data.progress import Progress

TRIES = 6  # in a row without a byte
FIRST_PAUSE = 1.0  # seconds; doubled from try to try
LONGEST_PAUSE = 60.0
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 2**18
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class StoppedError(Exception):
    """The others of this download have ended: another one failed, or the person has had enough."""


class BrokenOffError(Exception):
    """A transfer ended too early or could not begin; it may go better after `pause` seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Watch:
    """What the transfers of one download share: its progress, how much is to come, and the wish to end."""

    def __init__(self, progress: Progress, n_files: int = 1) -> None:
        self.progress = progress
        self.n_files = n_files
        self.stop = threading.Event()
        self.sizes: dict[str, int] = {}
        self.unverified: list[str] = []  # files of which nobody told the sha256

    def expect(self, url: str, size: int) -> None:
        """The file at `url` has so many bytes; those not asked for yet count as the mean."""
        self.sizes[url] = size
        self.progress.total = sum(self.sizes.values()) * self.n_files // len(self.sizes)


class Tries:
    """How often one URL has failed in a row, and the pause before it is asked again."""

    def __init__(self, url: str, watch: Watch) -> None:
        self.url, self.watch = url, watch
        self.again()

    def again(self) -> None:
        """Some of it came: begin to count anew."""
        self.failed, self.pause = 0, FIRST_PAUSE

    def broke_off(self, error: BrokenOffError) -> None:
        """Count a failure, say it and wait. Raises DataError when there were too many."""
        self.failed += 1
        if self.failed == TRIES:
            raise DataError(
                f"{self.url} cannot be downloaded: {error}, {TRIES} times in a row. Look at the network or "
                "the URL and type the same again; what has come so far is kept."
            )
        pause = min(max(self.pause, error.pause), LONGEST_PAUSE)
        self.watch.progress.note(f"{self.url}: {error}; again in {pause:g} s")
        self.pause *= 2
        if self.watch.stop.wait(pause):
            raise StoppedError


@dataclass
class About:
    """What the server said of a file when its first byte came."""

    url: str
    validator: str = ""  # ETag or Last-Modified: what is missing must be of the same file
    size: int = -1
    sha256: str = ""


class Transfer:
    """Brings the file at `url` to `path`."""

    def __init__(self, url: str, path: Path, watch: Watch) -> None:
        self.path, self.watch = path, watch
        self.beside = path.with_name(f"{path.name}.json")
        self.about = self._remembered(url)
        self.watch.progress.bring(self.have)

    @property
    def have(self) -> int:
        """Bytes that have come."""
        return self.path.stat().st_size if self.path.exists() else 0

    def run(self) -> About:
        """Ask until all of it is there; its length is the one that the server gave. Raises DataError."""
        tries = Tries(self.about.url, self.watch)
        while self.about.size < 0 or self.have != self.about.size:
            had = self.have
            try:
                self._request()
                break
            except BrokenOffError as error:
                if self.have > had:
                    tries.again()
                tries.broke_off(error)
            except urllib.error.HTTPError as error:
                if error.code == 416 and had:
                    self.forget()
                    continue
                raise DataError(
                    f"{self.about.url} cannot be downloaded: the server answers {error.code} {error.reason}. "
                    "Look at --base-url and --count."
                ) from None
            except OSError as error:
                raise DataError(
                    f"Cannot write {self.path}: {error.strerror or error}. Mend that and type the same "
                    "again; what has come so far is kept."
                ) from None
        return self.about

    def forget(self) -> None:
        """Take away what has come."""
        self.watch.progress.add(-self.have)
        self.path.unlink(missing_ok=True)
        self.beside.unlink(missing_ok=True)
        self.about = About(self.about.url)

    def _remembered(self, url: str) -> About:
        try:
            about = About(**json.loads(self.beside.read_bytes()))
        except (OSError, ValueError, TypeError):
            about = About("")
        if about.url != url or self.have > about.size >= 0:
            self.path.unlink(missing_ok=True)
            about = About(url)
        return about

    def _request(self) -> None:
        have = self.have
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and self.about.validator:
            headers["If-Range"] = self.about.validator
        answer, linked_sha256 = open_url(self.about.url, headers)
        with answer:
            start = self._start(answer, have)
            length = answer.headers.get("Content-Length") or ""
            end = start + int(length) if length.isdigit() else -1
            if not start:
                self.watch.progress.add(-have)
                self.about = About(self.about.url, _validator(answer.headers), end, linked_sha256)
                write_whole(self.beside, json.dumps(asdict(self.about)).encode())
            if self.about.size >= 0:
                self.watch.expect(self.about.url, self.about.size)
            self._copy(answer, "ab" if start else "wb")
        if 0 <= end != self.have:
            raise BrokenOffError(f"it broke off after {self.have:,} of {end:,} bytes")

    def _start(self, answer: Any, have: int) -> int:
        """Where the answer's bytes begin: at 0, or at those that are missing of the same file."""
        if answer.status != 206:
            return 0
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range") or "")
        same = found and int(found[1]) == have and found[2] in ("*", str(self.about.size))
        if not same or _validator(answer.headers) not in ("", self.about.validator):
            self.forget()
            raise BrokenOffError("the file has changed on the server")
        return have

    def _copy(self, answer: Any, mode: str) -> None:
        with open(self.path, mode, buffering=0) as file:
            while True:
                try:
                    block = answer.read1(BLOCK)
                except (OSError, http.client.HTTPException) as error:
                    raise BrokenOffError(_reason(error)) from None
                if not block:
                    break
                rest = memoryview(block)
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[file.write(rest) :]
                self.watch.progress.add(len(block))
                if self.watch.stop.is_set():
                    raise StoppedError
            sync_file(file.fileno())


def open_url(url: str, headers: Mapping[str, str]) -> tuple[Any, str]:
    """The answer to a GET, and the sha256 that a hub's `X-Linked-ETag` gave on the way to it, or "".

    Raises BrokenOffError for what may go better soon, urllib's HTTPError for other refusals.
    """
    redirects = _Redirects()
    request = urllib.request.Request(
        url, headers={"User-Agent": "nanofleet", "Accept-Encoding": "identity", **headers}
    )
    try:
        answer = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code in TRANSIENT:
            reason = f"the server answers {error.code} {error.reason}"
            raise BrokenOffError(reason, _retry_after(error.headers)) from None
        raise
    except (OSError, http.client.HTTPException) as error:
        raise BrokenOffError(_reason(error)) from None
    return answer, redirects.linked_sha256 or _linked_sha256(answer.headers)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; a hub names the sha256 in its own answer, which leads to the store's."""

    linked_sha256 = ""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.linked_sha256 = self.linked_sha256 or _linked_sha256(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _linked_sha256(headers: Any) -> str:
    found = re.fullmatch(r'"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag") or "")
    return found[1] if found else ""


def _validator(headers: Any) -> str:
    """What tells this file from a later one of the same URL; a weak ETag does not."""
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
    """What a failed connection was, in a few words."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"no byte in {TIMEOUT:g} s"
    if isinstance(error, http.client.IncompleteRead):
        return "it broke off"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
