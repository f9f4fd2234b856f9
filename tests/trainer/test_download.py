"""Public shards from a server that drops, cuts short, lies and refuses, as servers do."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_server import SHARDS, Handler, Server, Site, shard_bytes

from trainer.data import PUBLIC, DataError, prepare, transfer
from trainer.data.download import public_shards
from trainer.data.progress import Progress


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    served = Site()
    server = Server(("127.0.0.1", 0), type("MyHandler", (Handler,), {"site": served}))
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


def fetch(site: Site, out: Path, count: int = 3, *more: object) -> int:
    return run("--base-url", site.url, "--count", count, "--out", out, "--vocab-size", 300, *more)


def is_whole(out: Path, numbers: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Whether `out` holds these shards as they were served, the last for validation, and nothing else."""
    manifest = json.loads((out / "manifest.json").read_bytes())
    wanted = {f"shard_{number:05d}.parquet": SHARDS[f"/shard_{number:05d}.parquet"] for number in numbers}
    found = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    hashes = {shard["name"]: shard["sha256"] for shard in manifest["shards"]}
    splits = [shard["split"] for shard in manifest["shards"]]
    here = {path.name for path in out.iterdir()}
    return (
        found == wanted
        and hashes == {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
        and splits == ["train"] * (len(numbers) - 1) + ["val"]
        and here == {".lock", "manifest.json", "shards", "tokenizer"}
    )


def requests(site: Site) -> list[tuple[str, str, str]]:
    return [asked for asked in site.asked if asked[0] != "/SHA256SUMS"]


def test_a_good_server_is_asked_once_for_each(site: Site, tmp_path: Path) -> None:
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert sorted(requests(site)) == [(path, "", "") for path in list(SHARDS)[:3]]


def test_a_second_run_asks_for_what_is_missing_only(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert fetch(site, out) == 0
    site.asked.clear()
    assert fetch(site, out) == 0
    assert site.asked == []
    assert "nothing has changed" in capsys.readouterr().out
    assert fetch(site, out, 4) == 0
    assert requests(site) == [("/shard_00003.parquet", "", "")]
    assert is_whole(out, (0, 1, 2, 3))
    site.asked.clear()
    (out / "shards" / "shard_00001.parquet").unlink()
    assert fetch(site, out, 4) == 0
    assert requests(site) == [("/shard_00001.parquet", "", "")]
    assert is_whole(out, (0, 1, 2, 3))
    site.asked.clear()
    (out / "shards" / "shard_00001.parquet").write_bytes(b"cut")
    assert fetch(site, out, 4) == 0
    assert requests(site) == [("/shard_00001.parquet", "", "")]
    assert is_whole(out, (0, 1, 2, 3))


def test_the_validation_shard_may_be_another(site: Site, tmp_path: Path) -> None:
    assert fetch(site, tmp_path / "data", 2, "--val-shard", 3) == 0
    assert is_whole(tmp_path / "data", (0, 3))


@pytest.mark.parametrize("etag", [True, False])
def test_dropped_connections_and_short_reads_are_resumed(site: Site, tmp_path: Path, etag: bool) -> None:
    site.send_at_most, site.etag = 100_000, etag
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert site.sent == {path: len(SHARDS[path]) for path in list(SHARDS)[:3]}  # no byte twice
    second = [asked for asked in requests(site) if asked[1] == "bytes=100000-"]
    assert len(second) == 3
    assert all(bool(if_range) == etag for _, _, if_range in second)


def test_a_server_that_ignores_range_sends_all_again(site: Site, tmp_path: Path) -> None:
    site.ranges = False
    real, times = Handler.send_file, Counter[str]()

    def break_once(self: Handler, path: str, *more: Any) -> None:
        times[path] += 1
        self.send_at_most = 200_000 if times[path] == 1 else 0
        real(self, path, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "send_file", break_once)
        assert run("--base-url", site.url, "--count", 2, "--out", tmp_path / "data", "--vocab-size", 300) == 0
    assert is_whole(tmp_path / "data", (0, 1))
    assert any(asked[1] for asked in requests(site))


def test_a_file_that_changes_on_the_way_is_not_mixed(site: Site, tmp_path: Path) -> None:
    path = "/shard_00000.parquet"
    site.files[path] = shard_bytes(99)
    real, times = Handler.send_file, Counter[str]()

    def change(self: Handler, asked: str, *more: Any) -> None:
        times[asked] += 1
        self.send_at_most = 100_000 if asked == path and times[asked] == 1 else 0
        real(self, asked, *more)
        if asked == path:
            site.files[path] = SHARDS[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "send_file", change)
        assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert times[path] == 2


def test_a_length_that_is_not_given_is_borne(site: Site, tmp_path: Path) -> None:
    site.length = False
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again(
    site: Site, tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    site.refuse = [code, code]
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert f"the server answers {code}" in capsys.readouterr().err


def test_it_comes_back_when_the_server_wants(site: Site, tmp_path: Path) -> None:
    site.refuse, site.retry_after = [503], "1"
    started = time.monotonic()
    assert fetch(site, tmp_path / "data") == 0
    assert 1 <= time.monotonic() - started < 10


def test_a_server_that_stays_busy_is_given_up(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.refuse = [503] * 100
    assert fetch(site, tmp_path / "data") == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"prepare: http://127.*/shard_0000\d\.parquet cannot be downloaded: the server answers 503 "
        r"Service Unavailable, 6 times in a row\. .*type the same again.*",
        printed,
    )
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_refusal_is_final(
    site: Site, tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    site.refuse = [code] * 100
    assert fetch(site, tmp_path / "data") == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"the server answers {code}" in printed
    assert "--base-url" in printed
    assert len(requests(site)) <= 3


def test_a_shard_that_is_not_there_leaves_the_others(site: Site, tmp_path: Path) -> None:
    del site.files["/shard_00002.parquet"]
    out = tmp_path / "data"
    assert fetch(site, out) == 2
    assert not (out / "manifest.json").exists()
    come = {path.name: path.stat().st_size for path in (out / ".download").glob("*/*")}
    site.files.update(SHARDS)
    site.asked.clear()
    assert fetch(site, out) == 0
    assert is_whole(out)
    for path, asked_range, _ in requests(site):
        assert path[1:] not in come
        part = come.get(f"{path[1:]}.part", 0)
        assert asked_range == (f"bytes={part}-" if part else "")


def test_a_wrong_byte_is_found_by_the_hubs_hash_and_mended(site: Site, tmp_path: Path) -> None:
    site.linked = True
    site.wrong["/shard_00001.parquet"] = 1
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert [asked[0] for asked in requests(site)].count("/shard_00001.parquet") == 2


def test_a_list_of_hashes_that_is_cut_off_is_fetched_again(site: Site, tmp_path: Path) -> None:
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {path[1:]}\n" for path, data in SHARDS.items())
    site.files["/SHA256SUMS"] = sums.encode()
    site.cut["/SHA256SUMS"] = 1
    assert fetch(site, tmp_path / "data") == 0
    assert [asked[0] for asked in site.asked].count("/SHA256SUMS") == 2


@pytest.mark.parametrize("where", ["beside", "given"])
def test_a_wrong_byte_is_found_by_a_list_of_hashes(
    site: Site, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {path[1:]}\n" for path, data in SHARDS.items())
    arguments: list[object] = []
    if where == "beside":
        site.files["/SHA256SUMS"] = sums.encode()
    else:
        (tmp_path / "sums").write_text(sums)
        arguments = ["--sha256", tmp_path / "sums"]
    site.wrong["/shard_00001.parquet"] = 2
    assert fetch(site, tmp_path / "data", 3, *arguments) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"shard_00001.parquet from {site.url}/shard_00001.parquet was downloaded twice and is damaged"
        in printed
    )
    assert hashlib.sha256(SHARDS["/shard_00001.parquet"]).hexdigest() in printed
    assert not list((tmp_path / "data").rglob("shard_00001*"))
    assert fetch(site, tmp_path / "data", 3, *arguments) == 0
    assert is_whole(tmp_path / "data")


def test_what_came_from_one_address_is_not_taken_for_anothers(site: Site, tmp_path: Path) -> None:
    del site.files["/shard_00002.parquet"]
    assert fetch(site, tmp_path / "data") == 2
    assert run("--base-url", f"{site.url}/elsewhere", "--count", 2, "--out", tmp_path / "data") == 2
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_sums_that_were_asked_for_must_be_there(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = tmp_path / "sums"
    sums.write_text(f"{'0' * 64}  shard_00000.parquet\n")
    assert fetch(site, tmp_path / "data", 3, "--sha256", sums) == 2
    assert f"{sums} does not list 2 shard(s), such as shard_00001.parquet" in capsys.readouterr().err
    sums.write_text("garbage here\n")
    assert fetch(site, tmp_path / "data", 3, "--sha256", sums) == 2
    assert fetch(site, tmp_path / "data") == 0
    assert "no sha256 is known of 3 shard(s)" in capsys.readouterr().err


def test_a_page_instead_of_a_shard_is_refused(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.files["/shard_00000.parquet"] = b"<html>please log in</html>"
    assert fetch(site, tmp_path / "data") == 2
    assert "shard_00000.parquet" in capsys.readouterr().err
    assert not list((tmp_path / "data").rglob("shard_00000*"))


def test_an_address_where_nobody_answers_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.001)
    with socket.socket() as taken:  # bound, but not listening: nobody else can have it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert run("--base-url", url, "--count", 2, "--out", tmp_path / "data") == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith(f"prepare: {url}/SHA256SUMS cannot be downloaded: Connection refused")


def test_a_server_that_falls_silent_is_left(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "TIMEOUT", 0.2)
    real, times = Handler.send_file, Counter[str]()

    def fall_silent(self: Handler, path: str, *more: Any) -> None:
        times[path] += 1
        self.slow = 1.0 if times[path] == 1 else 0.0
        real(self, path, *more)

    monkeypatch.setattr(Handler, "send_file", fall_silent)
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert "no byte in 0.2 s" in capsys.readouterr().err


def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The kernel refuses to let a file grow, as on a full disk.
    with limited_files(100_000):
        assert fetch(site, tmp_path / "data", 2) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"Cannot write .*shard_0000\d\.parquet\.part: File too large\. .* the same again", printed
    )
    parts = {path.name[:-5]: path.stat().st_size for path in (tmp_path / "data").rglob("*.part")}
    assert 100_000 in parts.values()
    site.asked.clear()
    assert fetch(site, tmp_path / "data", 2) == 0
    assert is_whole(tmp_path / "data", (0, 1))
    for path, asked_range, _ in requests(site):
        assert asked_range == (f"bytes={parts[path[1:]]}-" if parts.get(path[1:]) else "")


def test_ctrl_c_keeps_what_has_come(site: Site, tmp_path: Path) -> None:
    site.slow = 0.15
    command = [sys.executable, "-m", "trainer", "prepare", "--base-url", site.url, "--count", "3"]
    command += ["--out", str(tmp_path / "data"), "--vocab-size", "300"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "no_proxy": "*"},
        stderr=subprocess.PIPE,
        text=True,
        # Of a shell's background jobs it would inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while sum(site.sent.values()) < 250_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=10)
    assert process.returncode == 130
    assert printed.splitlines()[-1] == "prepare: stopped; type the same again to continue."
    parts = {path.name: path.stat().st_size for path in (tmp_path / "data").rglob("*.part")}
    assert sum(parts.values()) > 100_000
    site.slow = 0
    site.asked.clear()
    assert fetch(site, tmp_path / "data") == 0
    assert is_whole(tmp_path / "data")
    assert {asked[1] for asked in requests(site)} >= {f"bytes={size}-" for size in parts.values()}


def test_a_line_has_the_rate_of_this_process_and_the_remaining_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("downloading", 100_000_000) as progress:
        progress.add_existing(40_000_000)
        progress.start_t -= 10
        progress.last_print_t -= 10
        progress.add(20_000_000)
    line = capsys.readouterr().err
    assert line == "downloading:  60% 60.0M/100M [00:10<00:20, 2.00MB/s]\n"


def test_the_named_data_sets_are_nanochats() -> None:
    url, names = public_shards("climbmix", 3)
    assert url.endswith("/karpathy/climbmix-400b-shuffle/resolve/main")
    assert names == ["shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"]
    assert public_shards("fineweb-edu", 2)[1] == ["shard_00000.parquet", "shard_01822.parquet"]
    assert len(public_shards("climbmix", 6543)[1]) == len(set(public_shards("climbmix", 6543)[1])) == 6543
    assert public_shards("http://host/data/", 2) == (
        "http://host/data",
        ["shard_00000.parquet", "shard_00001.parquet"],
    )
    for arguments, words in (
        (("climbmix", 6544), "climbmix has 6,543 shards: give --count 6543 or less"),
        (("climbmix", 1), "--count 1 is too small"),
        (("file:///etc", 2), f"public data set: {', '.join(PUBLIC)}"),
    ):
        with pytest.raises(DataError, match=words):
            public_shards(*arguments)
