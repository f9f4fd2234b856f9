"""Public shards: several at a time over HTTP, verified, and only those that are not here yet."""

import os
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from trainer.data import DataError
from trainer.data.files import sync_folder
from trainer.data.progress import Progress
from trainer.data.shards import SUMS, Entry, inspect, parse_sums, shard_name
from trainer.data.transfer import BrokenOffError, Transfer, Tries, Watch, open_url

# nanochat's data sets, where its nanochat/dataset.py finds them, and the number of their last shard, which is
# for validation however many are taken.
PUBLIC = {
    "climbmix": ("https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542),
    "fineweb-edu": ("https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822),
}
WORKERS = 4
NO_SUMS = (401, 403, 404, 410)  # how servers say that there is no such file
MOST_SUMS = 2**20  # bytes of a list of checksums


def public_shards(base_url: str, count: int, val_shard: int | None = None) -> tuple[str, list[str]]:
    """The URL of a data set, and the names of `count` of its shards, the one for validation last.

    That is number `val_shard`; where it is not given, the last one of a data set in `PUBLIC`, or of the
    `count` where `base_url` is a URL. Raises DataError.
    """
    url, last = PUBLIC.get(base_url, (base_url.rstrip("/"), None))
    if not url.startswith(("http://", "https://")):
        raise DataError(f"--base-url {base_url} is neither a URL (http...) nor one of {', '.join(PUBLIC)}.")
    if count < 2:
        raise DataError(f"--count {count} is too small: give 2 or more, for one of them is for validation.")
    if last is not None and max(count - 1, val_shard or 0) > last:
        raise DataError(f"{base_url} ends with {shard_name(last)}: give --count {last + 1} or less.")
    if val_shard is None:
        val_shard = count - 1 if last is None else last
    train = [number for number in range(count) if number != val_shard][: count - 1]
    return url, [shard_name(number) for number in (*train, val_shard)]


def download(base_url: str, names: Sequence[str], folder: Path, sums: Mapping[str, str]) -> list[Entry]:
    """Bring the shards `names` from `base_url` into `folder`; returns their entries (no split yet), in order.

    `sums` are their sha256 by name, where known. Raises DataError when one cannot be had; the parts stay.
    """
    with Progress(f"downloading {len(names)} shards") as progress:
        watch = Watch(progress, len(names))
        pool = ThreadPoolExecutor(WORKERS)
        running = {
            pool.submit(fetch, f"{base_url}/{name}", folder / name, sums.get(name, ""), watch): name
            for name in names
        }
        try:
            entries = {running[future]: future.result() for future in as_completed(running)}
        except BaseException as error:
            watch.stop.set()
            # Who presses Ctrl-C does not want to wait for a server: what came is in the parts already.
            pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
            raise
        pool.shutdown()
        if watch.unverified:
            progress.note(
                f"no sha256 is known of {len(watch.unverified)} shard(s), such as {watch.unverified[0]}: "
                "only their length and their text were checked"
            )
    return [entries[name] for name in names]


def fetch(url: str, path: Path, sha256: str, watch: Watch) -> Entry:
    """Have the shard at `url` in `path`; returns its entry.

    It is a `.part` until its length, its sha256 where one is known, and its text are right. One that is
    wrong is brought once more from the start, then given up with DataError.
    """
    if path.exists() and (entry := inspect(path))["sha256"] == (sha256 or entry["sha256"]):
        watch.progress.bring(entry["bytes"])
        watch.expect(url, entry["bytes"])
        return entry
    transfer = Transfer(url, path.with_name(f"{path.name}.part"), watch)
    problem = ""
    for _ in range(2):
        about = transfer.run()
        try:
            entry = inspect(transfer.path)
            wanted = sha256 or about.sha256 or entry["sha256"]
            if entry["sha256"] == wanted:
                if not (sha256 or about.sha256):
                    watch.unverified.append(path.name)
                os.replace(transfer.path, path)
                transfer.beside.unlink(missing_ok=True)
                sync_folder(path.parent)
                return entry | {"name": path.name}
            problem = f"its sha256 is {entry['sha256']} instead of {wanted}."
        except DataError as error:
            problem = str(error)
        transfer.forget()
    raise DataError(
        f"{path.name} from {url} came twice and is no good: {problem} Try again later or elsewhere."
    )


def download_sums(base_url: str) -> dict[str, str]:
    """The sha256 by name in the list `SHA256SUMS` beside the shards; empty where there is none."""
    url = f"{base_url}/{SUMS}"
    with Progress(SUMS) as progress:
        tries = Tries(url, Watch(progress))
        while True:
            try:
                answer, _ = open_url(url, {})
                with answer:
                    return parse_sums(answer.read(MOST_SUMS).decode(errors="replace"))
            except urllib.error.HTTPError as error:
                if error.code not in NO_SUMS:
                    raise DataError(
                        f"{url} cannot be asked for: the server answers {error.code} {error.reason}."
                    ) from None
                return {}
            except OSError:
                tries.broke_off(BrokenOffError("it broke off"))
            except BrokenOffError as error:
                tries.broke_off(error)
