"""Download of public shards over HTTP: several at a time, resumable, with verified sha256."""

import contextlib
import http.client
import os
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from trainer.data import PUBLIC, DataError
from trainer.data.files import sync_folder
from trainer.data.progress import Progress
from trainer.data.shards import SUMS, Entry, inspect, parse_sums, shard_name
from trainer.data.transfer import InterruptedTransferError, Retries, SharedState, Transfer, open_url

WORKERS = 4
NO_SUMS = (401, 403, 404, 410)  # status codes of servers that have no such file
MOST_SUMS = 2**20  # bytes of a list of checksums, at most


def public_shards(base_url: str, count: int, val_shard: int | None = None) -> tuple[str, list[str]]:
    """Select `count` shards of a data set; returns (URL of the data set, file names of the shards).

    The last name is that of the validation shard. The names before it are those of the `count` - 1 other
    shards with the lowest numbers, for training. base_url: a URL or a name in `PUBLIC`. val_shard: number of
    the validation shard, 0 or more; None: the last shard of a data set in `PUBLIC`, `count` - 1 for another
    URL. Raises DataError if `base_url` is neither a URL nor a name in `PUBLIC`, if `count` is below 2, or if
    a data set in `PUBLIC` has fewer shards.
    """
    url, last = PUBLIC.get(base_url, (base_url.rstrip("/"), None))
    if not url.startswith(("http://", "https://")):
        raise DataError(
            f"--base-url is {base_url}: it takes a URL that begins with http:// or https://, or the name of "
            f"a public data set: {', '.join(PUBLIC)}."
        )
    if count < 2:
        raise DataError(f"--count {count} is too small. One shard is for validation: give 2 or more.")
    if last is not None and max(count - 1, val_shard or 0) > last:
        raise DataError(
            f"{base_url} has {last + 1:,} shards: give --count {last + 1} or less, and --val-shard {last} "
            "or less."
        )
    if val_shard is None:
        val_shard = count - 1 if last is None else last
    train = [number for number in range(count) if number != val_shard][: count - 1]
    return url, [shard_name(number) for number in (*train, val_shard)]


def download(base_url: str, names: Sequence[str], folder: Path, sums: Mapping[str, str]) -> list[Entry]:
    """Download the shards `names` to `folder`, `WORKERS` at a time; returns their manifest entries.

    The entries are in the order of `names`, in the form of those of `write_shards` but without the key
    `split`. sums: {file name: known sha256}. Raises DataError if a download fails; partial files are kept.
    """
    with Progress(f"downloading {len(names)} shards") as progress:
        shared = SharedState(progress, len(names))
        pool = ThreadPoolExecutor(WORKERS)
        running = {
            pool.submit(fetch, f"{base_url}/{name}", folder / name, sums.get(name, ""), shared): name
            for name in names
        }
        try:
            entries = {running[future]: future.result() for future in as_completed(running)}
        except BaseException as error:
            shared.stop.set()
            # After Ctrl-C, do not wait for the server: the partial files have all received bytes.
            pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
            raise
        pool.shutdown()
        if shared.unverified:
            progress.note(
                f"no sha256 is known of {len(shared.unverified)} shard(s), such as {shared.unverified[0]}: "
                "only their length and their text were checked"
            )
    return [entries[name] for name in names]


def fetch(url: str, path: Path, sha256: str, shared: SharedState) -> Entry:
    """Download the shard at `url` to `path` unless `path` is that shard already; returns its manifest entry.

    The entry lacks the key `split`. sha256: the expected sha256 of the file, 64 hex digits; "": the one that
    the server sends, if it sends one. shared: progress, sizes and stop event of concurrent downloads. The
    file name ends with `.part` until the file is complete and its text and, if known, its sha256 are
    verified. An incomplete file is continued. If text or sha256 is wrong, the file is downloaded once more
    from the start. Raises DataError if the second file is wrong too, or if a download fails; StoppedError if
    `shared.stop` is set.
    """
    if path.exists():
        with contextlib.suppress(DataError):  # a damaged file is downloaded again
            entry = inspect(path)
            if entry["sha256"] == (sha256 or entry["sha256"]):
                shared.progress.add_existing(entry["bytes"])
                shared.set_size(url, entry["bytes"])
                return entry
    transfer = Transfer(url, path.with_name(f"{path.name}.part"), shared)
    problem = ""
    for _ in range(2):
        remote = transfer.run()
        try:
            entry = inspect(transfer.path)
            expected = sha256 or remote.sha256 or entry["sha256"]
            if entry["sha256"] == expected:
                if not (sha256 or remote.sha256):
                    shared.unverified.append(path.name)
                os.replace(transfer.path, path)
                transfer.metadata_path.unlink(missing_ok=True)
                sync_folder(path.parent)
                return entry | {"name": path.name}
            problem = f"its sha256 is {entry['sha256']} instead of {expected}."
        except DataError as error:
            problem = str(error)
        transfer.discard()
    raise DataError(
        f"{path.name} from {url} was downloaded twice and is damaged: {problem} Try again later, or use "
        "another --base-url."
    )


def download_sums(base_url: str) -> dict[str, str]:
    """Download SHA256SUMS from `base_url`; returns {file name: sha256}.

    Returns {} if the server has no such file or denies access to it. Raises DataError if the server answers
    with any other error, or not at all.
    """
    url = f"{base_url}/{SUMS}"
    with Progress(SUMS) as progress:
        retries = Retries(url, SharedState(progress))
        while True:
            try:
                response, _ = open_url(url, {})
                with response:
                    body = response.read(MOST_SUMS)
                    if len(body) < MOST_SUMS and response.length:  # bytes that have not come
                        raise InterruptedTransferError("the connection was lost")
                    return parse_sums(body.decode(errors="replace"))
            except urllib.error.HTTPError as error:
                if error.code not in NO_SUMS:
                    raise DataError(
                        f"{url} cannot be downloaded: the server answers {error.code} {error.reason}."
                    ) from None
                return {}
            except (OSError, http.client.HTTPException):
                retries.failed(InterruptedTransferError("the connection was lost"))
            except InterruptedTransferError as error:
                retries.failed(error)
