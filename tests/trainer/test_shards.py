"""nanochat's shards are taken as they are: the same bytes, order and split, hashed and counted."""

import argparse
import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import DataError, directory, files, prepare, shards
from trainer.data.directory import prepare_corpus, prepare_shards
from trainer.data.rows import pack
from trainer.data.shards import find_shards, inspect, parse_sums
from trainer.data.sources import shard_texts, text_columns

DOCUMENTS = 40


def documents(number: int) -> list[str | None]:
    """As nanochat's: some text; here also a document that is none."""
    return [f"shard {number} document {i}: the quick brown fox. " * (1 + i % 5) for i in range(DOCUMENTS)] + [
        None,
        "",
    ]


def write_shards(folder: Path, numbers: tuple[int, ...] = (0, 1, 2, 6542)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        table = pa.table({"id": list(range(DOCUMENTS + 2)), "text": documents(number)})
        pq.write_table(table, folder / f"shard_{number:05d}.parquet", row_group_size=7, compression="zstd")
    return folder


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "upstream")


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args([str(argument) for argument in arguments]))


def adopt(upstream: Path, out: Path) -> dict:
    prepare_shards(upstream, out, vocab_size=300)
    return json.loads((out / "manifest.json").read_bytes())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.parquet")}


def test_order_split_and_bytes_are_kept(upstream: Path, tmp_path: Path) -> None:
    before = digests(upstream)
    manifest = adopt(upstream, tmp_path / "data")
    names = [shard["name"] for shard in manifest["shards"]]
    assert names == [f"shard_{n:05d}.parquet" for n in (0, 1, 2, 6542)]
    assert [shard["split"] for shard in manifest["shards"]] == ["train", "train", "train", "val"]
    assert {shard["name"]: shard["sha256"] for shard in manifest["shards"]} == before
    assert digests(tmp_path / "data" / "shards") == digests(upstream) == before
    for number, shard in zip((0, 1, 2, 6542), manifest["shards"], strict=True):
        texts = [text for text in documents(number) if text]
        assert shard["documents"] == len(texts) == DOCUMENTS
        assert shard["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert shard["bytes"] == (upstream / shard["name"]).stat().st_size
    assert manifest["documents"] == 4 * DOCUMENTS
    rows = pack(tmp_path / "data", 16)
    assert len(rows.open("train")) > len(rows.open("val")) > 0


def test_they_are_linked_where_possible(upstream: Path, tmp_path: Path) -> None:
    adopt(upstream, tmp_path / "data")
    for path in upstream.iterdir():
        assert path.samefile(tmp_path / "data" / "shards" / path.name)


def test_they_are_copied_to_another_file_system(
    upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(files.os, "link", refuse)
    adopt(upstream, tmp_path / "data")
    assert digests(tmp_path / "data" / "shards") == digests(upstream)
    assert not (upstream / "shard_00000.parquet").samefile(tmp_path / "data" / "shards/shard_00000.parquet")


def test_a_link_among_them_is_followed(upstream: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.parquet"
    os.replace(upstream / "shard_00001.parquet", real)
    (upstream / "shard_00001.parquet").symlink_to(real)
    adopt(upstream, tmp_path / "data")
    assert not (tmp_path / "data" / "shards" / "shard_00001.parquet").is_symlink()
    assert digests(tmp_path / "data" / "shards") == digests(upstream)


def test_a_second_run_has_nothing_to_do_and_a_new_shard_is_seen(
    upstream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--shards", upstream, "--out", tmp_path / "data", "--vocab-size", 300, "--json")
    reused = []
    for _ in range(2):
        assert run(*arguments) == 0
        reused.append(json.loads(capsys.readouterr().out)["reused"])
    write_shards(upstream, (3,))
    assert run(*arguments) == 0
    last = json.loads(capsys.readouterr().out)
    assert [*reused, last["reused"]] == ["", "all", ""]
    assert last["shards"] == 5


@pytest.mark.parametrize("name", shards.BASE_FOLDERS)
def test_a_base_directory_of_nanochat_will_do(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path / "nanochat" / name)
    assert [file.path.parent.name for file in find_shards(tmp_path / "nanochat")] == [name] * 4


def test_an_existing_tokenizer_is_used(upstream: Path, tmp_path: Path) -> None:
    prepare_corpus([upstream], tmp_path / "other", vocab_size=280)
    mine = (tmp_path / "other" / "tokenizer" / "tokenizer.json").read_bytes()
    for expected in ("", "all"):
        result = prepare_shards(upstream, tmp_path / "data", tokenizer=tmp_path / "other" / "tokenizer")
        assert result.reused == expected
        assert result.vocab_size == 280
    assert (tmp_path / "data" / "tokenizer" / "tokenizer.json").read_bytes() == mine
    assert prepare_shards(upstream, tmp_path / "data", vocab_size=300).reused == "shards"


def test_every_shard_has_its_part_in_the_tokenizer(
    upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "TOKENIZER_SAMPLE_BYTES", 900)
    seen: list[str] = []
    train = directory.Tokenizer.train
    monkeypatch.setattr(
        directory.Tokenizer, "train", lambda texts, size: train((seen.append(t) or t for t in texts), size)
    )
    adopt(upstream, tmp_path / "data")
    assert {text[:7] for text in seen} == {"shard 0", "shard 1", "shard 2"}
    assert 900 <= sum(map(len, seen)) < 900 + 300


def test_checksums_beside_them_or_given_are_held_against_them(
    upstream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{sha256}  {name}\n" for name, sha256 in digests(upstream).items()]
    (upstream / "SHA256SUMS").write_text("".join(lines))
    adopt(upstream, tmp_path / "data")
    wrong = tmp_path / "wrong"
    wrong.write_text("".join(lines).replace(digests(upstream)["shard_00001.parquet"], "0" * 64))
    assert run("--shards", upstream, "--out", tmp_path / "two", "--sha256", wrong) == 2
    printed = capsys.readouterr().err
    assert f"The shard {upstream / 'shard_00001.parquet'} is damaged" in printed
    assert "0" * 64 in printed
    assert not (tmp_path / "two" / "manifest.json").exists()


def test_checksums_are_read_as_sha256sum_writes_them() -> None:
    text = f"{'a' * 64}  one\n{'B' * 64} *some/two\r\nnonsense\n{'c' * 63}  three\n"
    assert parse_sums(text) == {"one": "a" * 64, "two": "b" * 64}


def test_what_is_no_folder_of_shards_is_a_sentence(upstream: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no folder"):
        find_shards(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a folder"):
        find_shards(upstream / "shard_00000.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.parquet file in .*--source instead"):
        find_shards(tmp_path / "empty")
    with pytest.raises(DataError, match=r"only .*/shard_00005\.parquet: at least two shards are needed"):
        find_shards(write_shards(tmp_path / "single", (5,)))
    data = tmp_path / "data"
    adopt(upstream, data)
    with pytest.raises(DataError, match="Give another one with --out"):
        prepare_shards(data / "shards", data)


def test_damage_is_named_and_leaves_nothing(
    upstream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = upstream / "shard_00001.parquet"
    data = path.read_bytes()
    pq.write_table(pa.table({"text": pa.array([b"\xff\xfe"], pa.binary())}), path)
    bad_utf8 = path.read_bytes()
    middle = bytearray(data)
    middle[100:300] = b"\xff" * 200
    for damage, words in (
        (data[: len(data) // 2], "cannot be read"),
        (bytes(middle), "cannot be read"),
        (b"", "cannot be read"),
        (b"<html>404</html>", "cannot be read"),
        (bad_utf8, "holds binary, not strings"),
    ):
        path.write_bytes(damage)
        assert run("--shards", upstream, "--out", tmp_path / "data", "--vocab-size", 300) == 2
        printed = capsys.readouterr().err
        assert f"{path}" in printed
        assert words in printed
        assert "Traceback" not in printed
        assert [each.name for each in (tmp_path / "data").iterdir()] == [".lock"]


def test_text_that_is_not_utf8_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    pq.write_table(pa.table({"text": text}), path)
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read: .*UTF"):
        list(shard_texts(path))


def test_a_shard_of_one_huge_row_group_is_read_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "one.parquet"
    text = [f"{i} " + os.urandom(1000).hex() for i in range(20_000)]  # 40 MB that do not compress well
    pq.write_table(pa.table({"text": text}), path, compression="zstd", use_dictionary=False)
    assert pq.read_metadata(path).num_row_groups == 1
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    tracemalloc.start()
    for column in text_columns(path):
        assert column.nbytes < 2**20
        most = max(most, pool.bytes_allocated() - before)
    assert most < 10 * 2**20
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert inspect(path)["documents"] == 20_000
