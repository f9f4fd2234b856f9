"""`prepare` as a person runs it: its lines, its exit code, and a second run that does only what is needed."""

import argparse
import gzip
import json
import random
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from trainer.data import DataError, directory, prepare, progress, sources
from trainer.data.chat_directory import Source, prepare_conversations
from trainer.data.corpus import collect
from trainer.data.sources import find_files
from trainer.data.spool import Spool


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: " + "the quick brown fox jumps over it. " * (5 + i % 7))
    return folder


def prepared(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(*arguments, "--vocab-size", 300, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_it_writes_what_the_manifest_lists_and_sums_up(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "picture.bin").write_bytes(b"\0\1\2")
    assert run("--source", source, "--out", tmp_path / "data", "--vocab-size", 300) == 0
    printed = capsys.readouterr().out
    assert "60 documents" in printed
    assert "1 binary or not UTF-8" in printed
    assert "2 shards" in printed
    assert "a vocabulary of 300" in printed
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        ".lock",
        "manifest.json",
        "shards",
        "tokenizer",
    ]
    names = sorted(path.name for path in (tmp_path / "data" / "shards").iterdir())
    assert names == [entry["name"] for entry in manifest["shards"]]
    assert manifest["documents"] == sum(entry["documents"] for entry in manifest["shards"]) == 60


def test_a_second_run_does_only_what_has_changed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--source", source, "--out", tmp_path / "data")
    assert prepared(capsys, *arguments)["reused"] == ""
    before = (tmp_path / "data" / "manifest.json").read_bytes()
    assert prepared(capsys, *arguments)["reused"] == "all"
    assert (tmp_path / "data" / "manifest.json").read_bytes() == before
    assert run(*arguments, "--vocab-size", 280) == 0
    assert "the text has not changed" in capsys.readouterr().out
    assert prepared(capsys, *arguments)["reused"] == "shards"
    assert prepared(capsys, *arguments, "--seed", 7)["reused"] == ""
    (source / "new.txt").write_text("a new document\n" * 5)
    assert prepared(capsys, *arguments, "--seed", 7)["documents"] == 61
    (tmp_path / "data" / "shards" / "shard_00000.parquet").unlink()
    assert prepared(capsys, *arguments, "--seed", 7)["reused"] == ""
    (tmp_path / "data" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert prepared(capsys, *arguments, "--seed", 7)["reused"] == "shards"
    assert prepared(capsys, *arguments, "--seed", 7)["reused"] == "all"


def test_a_second_run_reads_what_could_not_be_read_before(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "man1").mkdir()
    (source / "man1" / "x.1").write_text(".TH X 1\na page\n")
    arguments = ("--source", source, "--out", tmp_path / "data")
    monkeypatch.setattr("trainer.data.sources.find_mandoc", lambda: None)
    monkeypatch.setattr(directory, "find_mandoc", lambda: None)
    assert prepared(capsys, *arguments)["skipped"] == {sources.MANUAL: 1}
    assert prepared(capsys, *arguments)["reused"] == "all"
    monkeypatch.setattr(directory, "find_mandoc", lambda: "/usr/bin/mandoc")
    assert prepared(capsys, *arguments)["reused"] == ""
    monkeypatch.setattr(directory, "find_mandoc", lambda: None)
    monkeypatch.setattr(directory.os, "access", lambda path, mode: not str(path).endswith("/3.txt"))
    assert prepared(capsys, *arguments)["reused"] == ""
    assert prepared(capsys, *arguments)["reused"] == "all"


def test_data_of_another_kind_are_not_replaced(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--source", source, "--out", tmp_path / "data")
    prepared(capsys, *arguments)
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"kind": "conversations"}))
    before = manifest.read_bytes()
    assert run(*arguments) == 2
    assert "has conversations, which the new data would replace" in capsys.readouterr().err
    assert manifest.read_bytes() == before
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(f"{json.dumps(turns)}\n" * 4)
    prepared(capsys, "--source", source, "--out", tmp_path / "text")
    with pytest.raises(DataError, match="has the text of base runs, which the new data"):
        prepare_conversations([Source(chats)], tmp_path / "text", tmp_path / "text" / "tokenizer")


def test_without_a_manifest_the_data_is_made_again_after_a_crash(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    arguments = ("--source", source, "--out", tmp_path / "data", "--vocab-size", 300)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_json", full)
        assert run(*arguments) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert not list((tmp_path / "data").glob(".preparing-*"))
    assert run(*arguments) == 0


def test_the_place_written_to_is_no_source(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = prepared(capsys, "--source", source, "--out", source / "data")
    assert prepared(capsys, "--source", source, "--out", source / "data")["reused"] == "all"
    assert first["documents"] == 60
    assert run("--source", source / "data", "--out", source / "data") == 2
    assert "Give another one with --out" in capsys.readouterr().err


def test_rows_from_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(capsys, "--source", source, "--out", tmp_path / "data")
    rows = ("--rows", "--data-dir", tmp_path / "data", "--sequence-len", 16)
    assert run(*rows, "--threads", -1) == 2
    assert "--threads -1 is too small: give 0 or more." in capsys.readouterr().err
    assert run(*rows) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rows: digest=")
    assert "(packed)" in printed
    assert "tokens/s" in printed
    assert run(*rows) == 0
    assert "(reused)" in capsys.readouterr().out
    assert run(*rows, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {
        "digest",
        "train_rows",
        "val_rows",
        "train_sha256",
        "val_sha256",
        "packed",
        "seconds",
    }
    assert result["packed"] is False


@pytest.mark.parametrize("step", ["--source", "--rows"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    draw, out = random.Random(1), tmp_path / "data"
    (tmp_path / "text").mkdir()
    for i in range(50):
        (tmp_path / "text" / f"{i}.txt").write_text(draw.randbytes(10_000).hex())
    make = ("--source", tmp_path / "text", "--out", out, "--vocab-size", 300)
    pack = ("--rows", "--data-dir", out, "--sequence-len", 32)
    if step == "--rows":
        assert run(*make) == 0
    here = {path.name for path in out.iterdir()} if out.exists() else {".lock"}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # as a full disk: files cannot grow
    try:
        assert run(*(pack if step == "--rows" else make)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    printed = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"^prepare: .*data.*: File too large\..*type the same again\.$", printed), printed
    assert {path.name for path in out.iterdir()} - {"rows"} == here
    assert not list(out.glob("rows/[!.]*"))
    assert not list(out.glob("rows/.packing*"))
    assert run(*make) == run(*pack) == 0


def test_progress_is_reported_in_lines_with_rate_and_what_is_left(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 1e-9)
    (source / "wide.txt").write_text("\N{SNOWMAN}" * 3000)  # 9,000 bytes
    shards = ("--shards", tmp_path / "data" / "shards", "--out", tmp_path / "other", "--vocab-size", 300)
    assert run("--source", source, "--out", tmp_path / "data", "--vocab-size", 300) == 0
    assert run("--rows", "--data-dir", tmp_path / "data", "--sequence-len", 16) == 0
    assert run(*shards) == 0
    lines = capsys.readouterr().err.splitlines()
    last = {line.split(":")[0]: line for line in lines}
    assert set(last) >= {
        "looking for text",
        "reading text",
        "writing shards",
        "training the tokenizer",
        "packing train rows",
        "packing val rows",
        "checking shards",
    }
    text = json.loads((tmp_path / "data" / "manifest.json").read_text())["text_bytes"]
    read = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    for label, n_bytes in (("reading text", read), ("writing shards", text)):
        assert f" {tqdm.format_sizeof(n_bytes)}/" in last[label]
    for label, line in last.items():
        assert re.search(r" \[\d\d:\d\d.*, [\d.k?MG]+(B| files)/s\]", line), line
        if label != "looking for text":
            assert " 100% " in line


@pytest.mark.parametrize("max_bytes", [0, 200_000])
def test_progress_of_compressed_text_never_passes_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """It counts what all files have on disk, or the text where a part of that is asked for."""
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(progress, "LOG_SECONDS", 1e-9)
    monkeypatch.setattr(progress.Progress, "display", lambda self, *_: shown.append((self.n, self.total)))
    for number in range(4):
        noise = random.Random(number).randbytes(40_000).hex().encode()
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(noise))
        (tmp_path / f"{number}.txt").write_bytes(noise)
    (tmp_path / "no.txt").write_bytes(b"\0" * 1000)
    files, _ = find_files([tmp_path])
    shown.clear()
    with Spool(tmp_path, 1) as spool:
        collect(files, spool, max_bytes, 1)
    on_disk = sum(file.size for file in files)
    assert {total for _, total in shown} == {max_bytes or on_disk}
    assert max(done for done, _ in shown) <= (max_bytes or on_disk)
    if not max_bytes:
        assert shown[-1] == (on_disk, on_disk)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "SOURCE", "--shards", "EMPTY", "--out", "OUT"], "one of the three"),
        (["--base-url", "climbmix", "--out", "OUT"], "--count N"),
        (["--base-url", "nowhere", "--count", "2", "--out", "OUT"], "public data set: climbmix"),
        (["--base-url", "climbmix", "--count", "9", "--val-shard", "-2", "--out", "OUT"], "--val-shard"),
        (["--source", "SOURCE", "--count", "2", "--out", "OUT"], "for shards"),
        (["--shards", "EMPTY", "--max-bytes", "9", "--out", "OUT"], "shards are used unchanged"),
        (["--shards", "EMPTY", "--out", "OUT"], "no .parquet file"),
        (["--source", "SOURCE", "--tokenizer", "EMPTY", "--out", "OUT"], "There is no"),
        (["--rows", "--data-dir", "OUT", "--sequence-len", "16", "--count", "3"], "remove the other options"),
        (["--out", "OUT"], "--source PATH"),
        (["--source", "SOURCE"], "--out DIR"),
        (["--source", "SOURCE/nowhere", "--out", "OUT"], "There is no file or folder"),
        (["--source", "EMPTY", "--out", "OUT"], "No text found in"),
        (["--source", "SOURCE", "--out", "OUT", "--vocab-size", "3"], "--vocab-size 3 is too small"),
        (["--source", "SOURCE", "--out", "OUT", "--max-bytes", "-1"], "--max-bytes -1 is too small"),
        (["--source", "SOURCE", "--out", "SOURCE/0.txt"], "Cannot write to"),
        (["--shards", "EMPTY", "--val-shard", "0", "--out", "OUT"], "--val-shard are for --base-url"),
        (["--source", "SOURCE", "--out", "OUT", "--sequence-len", "16"], "are for --rows"),
        (["--rows", "--data-dir", "OUT", "--sequence-len", "16", "--source", "SOURCE"], "or --rows"),
        (["--rows", "--data-dir", "OUT"], "--sequence-len T"),
        (["--rows", "--data-dir", "OUT", "--sequence-len", "16"], "There is no"),
    ],
)
def test_bad_input_gets_a_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"SOURCE": str(source), "EMPTY": str(tmp_path / "empty"), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("prepare: ")
    assert words in printed


def test_the_data_room_needs_no_torch() -> None:
    code = "import sys; from trainer.data import loader, prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
