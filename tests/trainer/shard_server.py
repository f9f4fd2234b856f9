"""A server of shards that misbehaves on request."""

import hashlib
import http.server
import io
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SIZE = 300_000


def shard_bytes(number: int) -> bytes:
    """A shard of about `SIZE` bytes."""
    noise = hashlib.shake_256(str(number).encode()).hexdigest(SIZE)
    table = pa.table({"text": [noise[start : start + 1000] for start in range(0, len(noise), 1000)]})
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    return file.getvalue()


SHARDS = {f"/shard_{number:05d}.parquet": shard_bytes(number) for number in range(4)}


@dataclass
class Site:
    """What the server serves and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(SHARDS))
    etag: bool = True
    ranges: bool = True
    length: bool = True
    linked: bool = False  # a hub: an answer with X-Linked-ETag leads to the file
    send_at_most: int = 0  # bytes of an answer before it drops the connection; 0: all
    refuse: list[int] = field(default_factory=list)  # status codes of the next answers
    retry_after: str = ""
    wrong: Counter[str] = field(default_factory=Counter)  # so often a path is served with a bit turned
    cut: Counter[str] = field(default_factory=Counter)  # so often only 10 bytes of a path come
    slow: float = 0.0  # seconds between blocks
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # path, Range, If-Range
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site
    slow = 0.0  # seconds between blocks of this answer
    send_at_most: int | None = None  # of this answer; None: as the site says

    def do_GET(self) -> None:
        site, path = self.site, self.path
        if site.linked and not path.startswith("/store"):
            data = site.files.get(path)
            self.send_response(302 if data else 404)
            if data:
                self.send_header("Location", "/store" + path)
                self.send_header("X-Linked-ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = path.removeprefix("/store")
        asked_range, if_range = self.headers.get("Range", ""), self.headers.get("If-Range", "")
        site.asked.append((path, asked_range, if_range))
        data = site.files.get(path)
        if path != "/SHA256SUMS" and site.refuse:
            self.send_response(site.refuse.pop(0))
            if site.retry_after:
                self.send_header("Retry-After", site.retry_after)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif data is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_file(path, data, asked_range, if_range)

    def send_file(self, path: str, data: bytes, asked_range: str, if_range: str) -> None:
        site = self.site
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        start = 0
        if site.ranges and asked_range and if_range in ("", etag):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked_range)[1])
        if start >= len(data) > 0:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if site.wrong[path] > 0:
            site.wrong[path] -= 1
            data = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if site.etag:
            self.send_header("ETag", etag)
        if site.length:
            self.send_header("Content-Length", str(len(data) - start))
        else:
            self.close_connection = True
        self.end_headers()
        limit = site.send_at_most if self.send_at_most is None else self.send_at_most
        if site.cut[path] > 0:
            site.cut[path] -= 1
            limit = 10
        end = min(len(data), start + limit) if limit else len(data)
        for begin in range(start, end, 65536):
            block = data[begin : min(end, begin + 65536)]
            self.wfile.write(block)
            site.sent[path] += len(block)
            time.sleep(self.slow or site.slow)
        if end < len(data):
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that leaves is no news."""
