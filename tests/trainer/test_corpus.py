"""Text of a machine -> shards: what is taken, what is left out, and the same bytes every time."""

import gzip
import hashlib
import itertools
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import DataError, spool
from trainer.data.corpus import ShardPlan, build_shards, collect, read_manifest
from trainer.data.sources import documents, find_files, shard_texts
from trainer.data.spool import Spool
from trainer.data.text import split_text


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def many(folder: Path, n: int = 60, size: int = 400) -> Path:
    return write_tree(
        folder, {f"f{i:03d}.txt": (f"document {i} has words\n" * 40)[:size].encode() for i in range(n)}
    )


def shard(path: Path, column: str = "text", values: list[object] | None = None) -> Path:
    values = ["one text\n", "another text\n"] if values is None else values
    pq.write_table(pa.table({column: values}), path)
    return path


def build(source: Path, out: Path, max_bytes: int = 0, shard_bytes: int = 10**8, seed: int = 1) -> list[dict]:
    out.mkdir(parents=True, exist_ok=True)
    files, _ = find_files([source])
    return build_shards(files, out, max_bytes, shard_bytes, seed)[0]


def texts_of(folder: Path, entries: list[dict]) -> list[str]:
    return [text for entry in entries for batch in shard_texts(folder / entry["name"]) for text in batch]


def test_text_is_taken_and_the_rest_left_out(tmp_path: Path) -> None:
    source = write_tree(
        tmp_path / "source",
        {
            "a.txt": "plain äöü\n".encode(),
            "b/c.md": b"\xef\xbb\xbfwith a byte order mark\n",
            "man/x.1.gz": gzip.compress(b".TH X 1\na man page\n"),
            "same.txt": "plain äöü\n".encode(),
            "empty.txt": b"",
            "blank.txt": b" \n\n",
            "latin1.txt": "äöü".encode("latin-1"),
            "zero.bin": b"text\0text",
            "late_zero.bin": b"a" * 10000 + b"\0",
            "cut.gz": gzip.compress(b"a long text " * 1000)[:-20],
            "not.gz": b"no gzip",
            ".git/config": b"hidden\n",
            "__pycache__/x.txt": b"cache\n",
        },
    )
    (tmp_path / "outside.txt").write_text("outside\n")
    (source / "link.txt").symlink_to(tmp_path / "outside.txt")
    (source / "round").symlink_to(source)
    os.link(source / "a.txt", source / "hard.txt")
    os.mkfifo(source / "pipe")
    files, unseen = find_files([source, source / "a.txt"])
    (tmp_path / "out").mkdir()
    entries, skipped = build_shards(files, tmp_path / "out", 0, 10**8, 1)
    assert sorted(texts_of(tmp_path / "out", entries)) == [
        ".TH X 1\na man page\n",
        "plain äöü\n",
        "with a byte order mark\n",
    ]
    assert unseen == {"empty": 1}
    assert skipped == {"binary or not UTF-8": 3, "unreadable": 2}


def test_an_unreadable_file_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = many(tmp_path / "source", 5)
    files, _ = find_files([source])

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("trainer.data.sources._open", refuse)
        with pytest.raises(Exception, match="unreadable"):
            list(documents(files[0], 1000))


def test_a_file_that_is_damaged_further_on_is_not_called_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 1000)
    monkeypatch.setattr("trainer.data.sources.HEAD_BYTES", 1000)
    write_tree(tmp_path / "source", {"a.txt": b"a good line\n" * 300 + b"\xff" + b"another\n" * 300})
    files, _ = find_files([tmp_path / "source"])
    with Spool(tmp_path, 1) as spool:
        assert collect(files, spool, 0, 1) == {"read only up to a damaged place": 1}


def test_a_hidden_source_that_is_named_is_read(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "source", {"a.txt": b"a\n", ".notes/b.txt": b"b\n", "c/d.txt": b"d\n"})
    names = [Path(file.name).name for file in find_files([source, source / ".notes", source / "c"])[0]]
    assert sorted(names) == ["a.txt", "b.txt", "d.txt"]


def test_a_long_manual_page_is_rendered_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 1000)
    monkeypatch.setattr("trainer.data.sources.find_mandoc", lambda: "mandoc")
    monkeypatch.setattr("trainer.data.sources.render_manual", lambda mandoc, page: f"{len(page)} letters")
    page = b".TH X 1\n" + b"some text\n" * 2000
    write_tree(tmp_path, {"man1/x.1": page})
    (file,) = find_files([tmp_path])[0]
    assert list(documents(file, 10**6)) == [f"{len(page)} letters"]


def test_every_text_is_in_exactly_one_shard_with_true_figures(tmp_path: Path) -> None:
    source = many(tmp_path / "source")
    entries = build(source, tmp_path / "out", shard_bytes=5000)
    assert [entry["split"] for entry in entries] == ["train"] * (len(entries) - 1) + ["val"]
    assert len(entries) >= 4
    wanted = sorted(path.read_text() for path in source.iterdir())
    assert sorted(texts_of(tmp_path / "out", entries)) == wanted
    for entry in entries:
        path = tmp_path / "out" / entry["name"]
        texts = texts_of(tmp_path / "out", [entry])
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert entry["bytes"] == path.stat().st_size
        assert entry["documents"] == len(texts)
        assert entry["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_the_same_input_gives_the_same_bytes_and_another_seed_another_order(tmp_path: Path) -> None:
    source = many(tmp_path / "source")
    first = build(source, tmp_path / "one")
    assert build(source, tmp_path / "two") == first
    other = build(source, tmp_path / "three", seed=2)
    assert other[0]["sha256"] != first[0]["sha256"]


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    for i, name in enumerate(["z", "a", "k", "b"]):
        write_tree(tmp_path / "one", {f"{name}.txt": b"a text that is number %d\n" % i * 10})
        write_tree(tmp_path / "two", {f"{i}/x.txt": b"a text that is number %d\n" % i * 10})
    assert build(tmp_path / "one", tmp_path / "out1") == build(tmp_path / "two", tmp_path / "out2")


@pytest.mark.parametrize("recent", [0, 3, 10**6])
def test_each_document_is_taken_once_whatever_is_remembered(
    tmp_path: Path, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "RECENT", recent)
    texts = [f"text {i % 40} \N{SNOWMAN}".encode() for i in range(200)]
    with Spool(tmp_path, 1) as first, Spool(tmp_path, 2) as second:
        for text in texts:
            first.add(text)
        for text in reversed(texts):
            second.add(text)
        assert first.add(b" \n") == 0
        assert first.close_input() == second.close_input() == (40, sum(map(len, set(texts))))
        assert sorted(first) == sorted(second) == sorted(set(texts))
        assert list(first) == list(first) != list(second)
        assert list(first) != sorted(first)
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "RECENT", 1000)
    monkeypatch.setattr(spool, "BUFFER_BYTES", 4096)
    most = []
    for n in (5_000, 40_000):
        tracemalloc.start()
        with Spool(tmp_path, 1) as kept:
            for i in range(n):
                kept.add(b"document %d of some text" % i)
            assert kept.close_input()[0] == n
            assert sum(1 for _ in kept) == n
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] - most[0] < 35_000 * 5  # 5 bytes a document: a 32nd of them is sorted at a time


def test_validation_is_drawn_from_all_folders(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_tree(
            tmp_path / "source" / folder, {f"{i}.txt": f"{folder} {i}\n".encode() * 20 for i in range(100)}
        )
    entries = build(tmp_path / "source", tmp_path / "out")
    first_letters = [text[0] for text in texts_of(tmp_path / "out", entries[-1:])]
    assert 0.3 < first_letters.count("a") / len(first_letters) < 0.7


def test_max_bytes_takes_from_all_over(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tree(source / "a", {"huge.txt": b"".join(b"%07d\n" % i for i in range(100_000))})
    for folder in ("b", "c"):
        many(source / folder, 100, 400)
    (source / "c" / "f000.txt").write_text("only here\n")
    entries = build(source, tmp_path / "out", max_bytes=60_000)
    texts = texts_of(tmp_path / "out", entries)
    size = sum(len(text.encode()) for text in texts)
    assert 50_000 < size <= 60_000
    assert sum(len(text) for text in texts if text[0] == "0") < 40_000
    assert sum(text.startswith("document") for text in texts) > 50


def test_long_documents_are_cut_behind_lines_and_nothing_is_lost() -> None:
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500 + "\nend"
    pieces = list(split_text(text, 100))
    assert "".join(pieces) == text
    assert max(len(piece) for piece in pieces) <= 100
    assert all(piece.endswith("\n") for piece in pieces[:50])
    assert [len(piece) for piece in split_text("1234567\n" * 101, 400)] == [272, 272, 264]


def test_a_file_of_several_blocks_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.sources.HEAD_BYTES", 10)
    monkeypatch.setattr("trainer.data.sources.BLOCK_BYTES", 33)
    text = "".join(f"wörd {i} 日本\n" for i in range(200)) + "no newline at the end é"
    (tmp_path / "a.txt").write_text(text)
    files, _ = find_files([tmp_path])
    assert "".join(documents(files[0], 50)) == text


def test_one_long_file_is_enough_for_training_and_validation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"this is line {i}\n" for i in range(5000)))
    entries = build(tmp_path / "one.txt", tmp_path / "out")
    assert [entry["split"] for entry in entries] == ["train", "val"]
    assert entries[0]["text_bytes"] >= entries[1]["text_bytes"] > 0


def test_parquet_shards_are_sources_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shard(source / "shard_00000.parquet", values=["eins", None, "zwei"])
    shard(source / "shard_00001.parquet", values=["drei"])
    entries = build(source, tmp_path / "out")
    assert sorted(texts_of(tmp_path / "out", entries)) == ["drei", "eins", "zwei"]


def test_bad_shards_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 no more")
    for path, words in (
        (damaged, "cannot be read"),
        (shard(tmp_path / "column.parquet", column="body"), r"no column `text` \(its columns: body\)"),
        (shard(tmp_path / "type.parquet", values=[1, 2]), "holds int64, not strings"),
        (shard(tmp_path / "nulls.parquet", values=["", None]), "is empty"),
        (tmp_path / "missing.parquet", "There is no shard"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            list(shard_texts(path))
        assert str(path) in str(caught.value)


def test_a_shard_damaged_in_its_middle_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "middle.parquet", values=[f"text {i} " * 50 for i in range(2000)])
    data = bytearray(path.read_bytes())
    data[1000:3000] = b"\xff" * 2000
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"middle\.parquet"):
        list(shard_texts(path))


def test_missing_sources_and_too_little_text_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file or folder"):
        find_files([tmp_path / "nowhere"])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("short\n")
    with pytest.raises(DataError, match="Too little text: 6 bytes"):
        build(tmp_path / "a", tmp_path / "out")
    (tmp_path / "a" / "x.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"No text found.*give a folder with \.txt"):
        build(tmp_path / "a", tmp_path / "out")


def test_plans_cover_all_documents_in_even_shards() -> None:
    generator = np.random.default_rng(0)
    for n in (2, 3, 10, 100, 1000):
        for shard_bytes in (1, 1000, 30_000, 10**9):
            ends = np.cumsum(generator.integers(1, 3000, n)).tolist()
            plan = ShardPlan.make(ends[-1], shard_bytes)
            shards = [plan.shard(start, end) for start, end in itertools.pairwise([0, *ends])]
            assert shards == sorted(shards)
            assert shards[0] < plan.n_train
            assert shards[-1] == plan.n_train
            if n == 1000 and shard_bytes == 30_000:
                sizes = np.diff([0, *ends])
                of_shard = [sum(sizes[np.array(shards) == k]) for k in range(plan.n_train)]
                assert max(of_shard) - min(of_shard) < 2 * 3000
                assert 27_000 < np.mean(of_shard) < 33_000


@pytest.mark.parametrize("content", ["{", '{"schema": 9}', '{"schema": 1, "shards": []}', "[]"])
def test_a_bad_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_validation_must_be_the_last_shard(tmp_path: Path) -> None:
    shards = [{"split": "val"}, {"split": "train"}]
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "shards": shards}))
    with pytest.raises(DataError, match="last shard alone"):
        read_manifest(tmp_path)
