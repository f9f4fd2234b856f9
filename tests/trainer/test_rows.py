"""Rows: full, each starting a document, nothing lost, packed once whoever asks."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data import DataError
from trainer.data.directory import prepare_corpus
from trainer.data.loader import permutation
from trainer.data.rows import Rows, fill_rows, pack, row_dtype
from trainer.data.sources import shard_texts
from trainer.data.tokenizer import Tokenizer

BOS = 60000


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(80):
        (source / f"{i}.txt").write_text(f"file {i}: " + "the quick brown fox jumps. " * (1 + i % 17))
    prepare_corpus([source], tmp_path / "data", vocab_size=300)
    return tmp_path / "data"


def numbered(lengths: list[int]) -> Iterator[np.ndarray]:
    """Documents whose tokens are all different: BOS, n, n+1, ..."""
    start = 0
    for length in lengths:
        yield np.array([BOS, *range(start, start + length - 1)], dtype=np.uint16)
        start += length - 1


def test_rows_are_full_and_start_with_bos() -> None:
    lengths = (permutation(200, 1) % 90 + 2).tolist()
    rows = list(fill_rows(numbered(lengths), 33, BOS))
    assert len(rows) > 200
    assert all(row.shape == (33,) and row[0] == BOS for row in rows)


def test_no_token_is_lost_but_those_of_the_last_row() -> None:
    lengths = (permutation(200, 2) % 90 + 2).tolist()
    tokens = np.concatenate(list(fill_rows(numbered(lengths), 33, BOS)))
    tokens = tokens[tokens != BOS]
    assert len(set(tokens.tolist())) == len(tokens)
    assert len(tokens) >= sum(lengths) - len(lengths) - 33


def test_documents_that_fit_stay_whole() -> None:
    rows = list(fill_rows(numbered([10, 6, 4, 10]), 10, BOS))
    assert [row.tolist() for row in rows] == [
        [BOS, *range(17, 26)],
        [BOS, *range(0, 9)],
        [BOS, *range(9, 14), BOS, 14, 15, 16],
    ]


def test_the_shortest_is_cut_and_its_rest_starts_anew() -> None:
    rows = list(fill_rows(numbered([13, 30]), 8, BOS))
    assert rows[0].tolist() == [BOS, *range(0, 7)]
    assert rows[1].tolist() == [BOS, *range(7, 12), BOS, 12]
    assert rows[2].tolist() == [BOS, *range(13, 20)]


def test_no_documents_make_no_rows() -> None:
    assert list(fill_rows(iter([]), 8, BOS)) == []


def test_packed_rows_hold_the_text_of_the_shards(data_dir: Path) -> None:
    info = pack(data_dir, 16)
    rows = Rows(info.path)
    tokenizer = Tokenizer.load(data_dir / "tokenizer")
    train, val = rows.split("train"), rows.split("val")
    assert info.packed
    assert train.shape == (info.train_rows, 17)
    assert val.shape == (info.val_rows, 17)
    assert (train[:, 0] == tokenizer.bos_id).all()
    assert (val[:, 0] == tokenizer.bos_id).all()
    assert train.dtype == np.uint16
    shards = [
        s["name"]
        for s in json.loads((data_dir / "manifest.json").read_text())["shards"]
        if s["split"] == "train"
    ]
    ids: list[int] = []
    for name in shards:
        for batch in shard_texts(data_dir / "shards" / name):
            for text in batch:
                ids += tokenizer.encode(text)
    packed = np.bincount(train[train != tokenizer.bos_id].astype(np.int64), minlength=tokenizer.vocab_size)
    missing = np.bincount(ids, minlength=tokenizer.vocab_size) - packed
    assert (missing >= 0).all()
    assert missing.sum() < 17


def test_rows_are_made_once_and_the_same_bytes_elsewhere(data_dir: Path, tmp_path: Path) -> None:
    first = pack(data_dir, 16, threads=1)
    again = pack(data_dir, 16)
    assert (first.packed, again.packed) == (True, False)
    assert again.digest == first.digest
    (first.path / "meta.json").unlink()
    (data_dir / "rows" / ".packing-killed").mkdir()
    third = pack(data_dir, 16, threads=2)
    assert third.packed
    assert (third.train_sha256, third.val_sha256) == (first.train_sha256, first.val_sha256)
    assert not list((data_dir / "rows").glob(".packing-*"))


def test_digest_changes_with_text_tokenizer_and_length(data_dir: Path) -> None:
    digests = {pack(data_dir, 16).digest, pack(data_dir, 24).digest}
    source = data_dir.parent / "source"
    prepare_corpus([source], data_dir, vocab_size=290)
    digests.add(pack(data_dir, 16).digest)
    (source / "new.txt").write_text("something new\n" * 20)
    prepare_corpus([source], data_dir, vocab_size=290)
    digests.add(pack(data_dir, 16).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_damaged_rows_are_packed_again(data_dir: Path, damage: str) -> None:
    info = pack(data_dir, 16)
    file = info.path / "train.bin"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    elif damage == "gone":
        file.unlink()
    else:
        (info.path / "meta.json").write_text("{")
    with pytest.raises(DataError, match="holds no whole rows"):
        Rows(info.path)
    assert pack(data_dir, 16).packed
    assert len(Rows(info.path).split("train")) == info.train_rows


def _pack_in_process(data_dir: Path, queue: Any) -> None:
    queue.put(pack(data_dir, 16).packed)


def test_of_several_packers_one_packs(data_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_pack_in_process, args=(data_dir, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(results) == [False, False, True]


def test_an_interrupted_packing_leaves_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.data.rows.os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            pack(data_dir, 16)
    assert [path.name for path in (data_dir / "rows").iterdir()] == [".lock"]
    assert pack(data_dir, 16).packed


def test_bad_data_is_a_sentence(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too small"):
        pack(data_dir, 1)
    with pytest.raises(DataError, match=r"Too little text .* smaller sequence length"):
        pack(data_dir, 100_000)
    with pytest.raises(DataError, match="python -m trainer prepare"):
        pack(tmp_path / "nothing", 16)
    shard = data_dir / "shards" / "shard_00000.parquet"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"x")
    with pytest.raises(DataError, match=r"shard_00000\.parquet is damaged"):
        pack(data_dir, 16)
    shard.unlink()
    with pytest.raises(DataError, match=r"no shard .*shard_00000\.parquet"):
        pack(data_dir, 16)
    tokenizer = data_dir / "tokenizer" / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    with pytest.raises(DataError, match="not the tokenizer that the manifest names"):
        pack(data_dir, 16)


def test_token_type_follows_the_vocabulary() -> None:
    assert row_dtype(65536) == np.uint16
    assert row_dtype(65537) == np.uint32
