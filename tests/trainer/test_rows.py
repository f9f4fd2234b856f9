"""Rows: full, each starting a document, nothing lost, packed once whoever asks."""

import json
import multiprocessing
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data import DataError, RowsChangedError
from trainer.data.dataset import Dataset
from trainer.data.directory import prepare_corpus
from trainer.data.loader import permutation
from trainer.data.packing import fill_rows
from trainer.data.rows import pack, row_dtype
from trainer.data.sources import shard_texts
from trainer.data.tokenizer import Tokenizer
from trainer.outcome import conclude

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


def plain_rows(documents: list[list[int]], row_tokens: int, bos: int, at_hand: int) -> list[list[int]]:
    """The rule as one would say it, slowly: of the first `at_hand` documents the largest that fits, else the
    shortest is cut, and its rest comes back as one that starts again. Among equal ones the last to come for
    what fits, the first for what is cut."""
    coming, waiting, rows = list(documents), [], []
    while True:
        row: list[int] = []
        while len(row) < row_tokens:
            while coming and len(waiting) < at_hand:
                waiting.append(coming.pop(0))
            if not waiting:
                return rows
            room = row_tokens - len(row)
            fitting = [i for i, document in enumerate(waiting) if len(document) <= room]
            if fitting:
                chosen = max(fitting, key=lambda i: (len(waiting[i]), i))
            else:
                chosen = min(range(len(waiting)), key=lambda i: (len(waiting[i]), i))
            document = waiting.pop(chosen)
            row += document[:room]
            if len(document) > room:
                waiting.append([bos, *document[room:]])
        rows.append(row)


@pytest.mark.parametrize("seed", range(20))
def test_packing_equals_the_plain_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    at_hand, row_tokens = int(draw.integers(1, 30)), int(draw.integers(3, 40))
    lengths = draw.integers(1, draw.integers(2, 120), size=draw.integers(1, 150)).tolist()
    documents = [[BOS, *draw.integers(0, 50000, length).tolist()] for length in lengths]
    monkeypatch.setattr("trainer.data.packing.BUFFER_DOCUMENTS", at_hand)
    rows = [
        row.tolist() for row in fill_rows((np.array(d, dtype=np.uint16) for d in documents), row_tokens, BOS)
    ]
    assert rows == plain_rows(documents, row_tokens, BOS, at_hand)
    assert all(len(row) == row_tokens and row[0] == BOS for row in rows)


def test_no_documents_make_no_rows() -> None:
    assert list(fill_rows(iter([]), 8, BOS)) == []


def test_packed_rows_hold_the_text_of_the_shards(data_dir: Path) -> None:
    info = pack(data_dir, 16)
    tokenizer = Tokenizer.load(data_dir / "tokenizer")
    train, val = info.open("train"), info.open("val")
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


def test_rows_are_made_once_and_the_same_bytes_elsewhere(data_dir: Path) -> None:
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


def test_rows_do_not_depend_on_threads_or_on_how_text_is_handed_to_them(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = set()
    for threads, job, ahead in ((1, 100_000, 4), (2, 100_000, 4), (5, 1, 1), (3, 700, 2)):
        monkeypatch.setattr("trainer.data.tokenizer.JOB_CHARACTERS", job)
        monkeypatch.setattr("trainer.data.tokenizer.JOBS_AHEAD", ahead)
        info = pack(data_dir, 16, threads=threads)
        made.add((info.train_sha256, info.val_sha256))
        (info.path / "meta.json").unlink()
    assert len(made) == 1


def test_rows_of_other_data_go_and_those_of_other_lengths_stay(data_dir: Path) -> None:
    old = pack(data_dir, 16)
    mapped = old.open("train")
    before = mapped.copy()
    kept = pack(data_dir, 24)
    assert old.path.is_dir()
    (data_dir.parent / "source" / "new.txt").write_text("something new\n" * 20)
    prepare_corpus([data_dir.parent / "source"], data_dir, vocab_size=300)
    new = pack(data_dir, 16)
    assert {path.name for path in (data_dir / "rows").iterdir()} == {".lock", new.path.name}
    assert kept.path != new.path
    assert (mapped == before).all()  # a run that reads them continues


def test_reading_a_batch_copies_only_its_rows(data_dir: Path) -> None:
    info = pack(data_dir, 16)
    train = info.open("train")
    with open(info.path / "train.bin", "wb") as file:  # a file of 2 GiB without a byte on the disk
        file.truncate(2**31)
    big = np.memmap(info.path / "train.bin", dtype=train.dtype, mode="r", shape=(2**31 // 34, 17))
    chosen = np.array([5, 10**7, 3, 6 * 10**7])
    tracemalloc.start()
    batch = big[chosen]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.shape == (4, 17)
    assert most < 20_000
    assert not big.flags.writeable


def test_digest_changes_with_text_tokenizer_and_length(data_dir: Path) -> None:
    digests = {pack(data_dir, 16).digest, pack(data_dir, 24).digest}
    source = data_dir.parent / "source"
    prepare_corpus([source], data_dir, vocab_size=290)
    digests.add(pack(data_dir, 16).digest)
    (source / "new.txt").write_text("something new\n" * 20)
    prepare_corpus([source], data_dir, vocab_size=290)
    digests.add(pack(data_dir, 16).digest)
    assert len(digests) == 4


def flip_a_bit(file: Path, offset: int) -> None:
    """In place, as a disk or a memory does."""
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("split", ["train", "val"])
def test_rows_with_one_bit_changed_are_packed_again(
    data_dir: Path, split: str, capfd: pytest.CaptureFixture[str]
) -> None:
    info = pack(data_dir, 16)
    file = info.path / f"{split}.bin"
    before = file.read_bytes()
    flip_a_bit(file, len(before) // 2)
    assert pack(data_dir, 16).packed
    assert f"warning: {file} has changed since it was packed" in capfd.readouterr().err
    assert file.read_bytes() == before
    assert not pack(data_dir, 16).packed


def test_damaged_rows_that_cannot_be_packed_again_are_named_with_the_command(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = pack(data_dir, 16)
    flip_a_bit(info.path / "train.bin", 7)

    def read_only(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("trainer.data.rows.os.replace", read_only)
    command = f"python -m trainer prepare --rows --data-dir {data_dir} --sequence-len 16"
    with pytest.raises(
        DataError, match=rf"train\.bin has changed since it was packed .* {command} .*Read-only"
    ):
        pack(data_dir, 16)


def test_a_row_that_changes_after_its_file_was_opened_is_named_when_it_is_read(data_dir: Path) -> None:
    data = Dataset.open(data_dir, 16)
    file = data.info.path / "train.bin"
    numbers = np.array([3, 5, 0])
    before = data.train[numbers]
    flip_a_bit(file, 5 * 34 + 9)
    assert (data.train[np.array([3, 4, 0])][[0, 2]] == before[[0, 2]]).all()
    with pytest.raises(RowsChangedError, match=rf"Row 5 of {file} has changed"):
        data.train[numbers]
    assert conclude(RowsChangedError("A row."))[0] == "retryable"


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
    again = pack(data_dir, 16)
    assert again.packed
    assert len(again.open("train")) == info.train_rows


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
        with pytest.raises(DataError, match=r"cannot be written to .*rows: No space left.* the same again"):
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
