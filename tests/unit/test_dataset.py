"""The dataset role's module and filters: every way a data directory can differ from its manifest is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import dataset_findings as filters
from ansible_collections.nanofleet.fleet.plugins.module_utils import file_digests
from ansible_collections.nanofleet.fleet.plugins.module_utils import shard_digests as module
from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import Digests, folder_digest

ROLE = Path(__file__).resolve().parents[2] / "roles" / "dataset"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    shards = []
    for i in range(3):
        name, content = f"shard_{i:05d}.parquet", bytes([i]) * 100
        (tmp_path / "shards" / name).write_bytes(content)
        shards.append({"name": name, "sha256": sha(content), "bytes": 100, "split": "train"})
    manifest = {"schema": 1, "shards": shards, "tokenizer_sha256": sha(b"{}")}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_whole_data_are_hashed_once(data: Path) -> None:
    first = module.verify(data, "")
    assert (first["findings"], first["shards"], first["bytes"], first["hashed"]) == ([], 3, 300, 4)
    assert module.verify(data, first["manifest_sha256"])["hashed"] == 0


def missing(data: Path) -> None:
    (data / "shards" / "shard_00001.parquet").unlink()


def extra(data: Path) -> None:
    (data / "shards" / "shard_00009.parquet").write_bytes(b"x")


def short(data: Path) -> None:
    os.truncate(data / "shards" / "shard_00000.parquet", 99)


def altered(data: Path) -> None:
    """With the size and the modification time it had: only the time of the last change of status differs."""
    path = data / "shards" / "shard_00002.parquet"
    before = path.stat()
    path.write_bytes(b"\xff" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tokenizer(data: Path) -> None:
    (data / "tokenizer" / "tokenizer.json").write_bytes(b"[]")


@pytest.mark.parametrize(
    ("damage", "phrase"),
    [
        (missing, "shard_00001.parquet is missing"),
        (extra, "shard_00009.parquet is not in the manifest"),
        (short, "shard_00000.parquet has 99 bytes instead of 100"),
        (altered, "shard_00002.parquet was altered (its sha256 is not the manifest's)"),
        (tokenizer, "tokenizer/tokenizer.json was altered (its sha256 is not the manifest's)"),
    ],
)
def test_damage_is_named(data: Path, damage: Callable[[Path], None], phrase: str) -> None:
    module.verify(data, "")
    damage(data)
    assert module.verify(data, "")["findings"] == [phrase]


def test_another_manifest_than_the_controllers(data: Path) -> None:
    assert module.verify(data, "0" * 64)["findings"] == ["manifest.json is not the controller's"]


def test_no_data_and_no_manifest(tmp_path: Path, data: Path) -> None:
    assert module.verify(tmp_path / "nowhere", "")["findings"] == ["manifest.json is missing"]
    (data / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a manifest"):
        module.verify(data, "")


def test_check_mode_remembers_nothing(data: Path) -> None:
    module.verify(data, "", remember=False)
    assert not (data / module.STORED).exists()


def test_a_spoilt_memory_is_no_answer(data: Path) -> None:
    (data / module.STORED).write_text('{"shard_00000.parquet": "yes"}')
    assert module.verify(data, "")["findings"] == []


def test_all_hosts_that_differ_are_named_at_once() -> None:
    hosts = {
        "a": {"__dataset_verified": {"findings": [], "manifest_sha256": "m" * 64}},
        "b": {"__dataset_verified": {"findings": ["x is missing"], "manifest_sha256": "m" * 64}},
        "c": {"__dataset_verified": {"findings": [], "manifest_sha256": "n" * 64}},
        "d": {"__dataset_verified": {"skipped": True}},
    }
    assert filters.dataset_findings(list(hosts), hosts) == [
        "b: x is missing.",
        "c: the digest of its manifest.json is nnnnnnnnnnnn, on the others mmmmmmmmmmmm.",
    ]
    assert filters.dataset_findings(["d"], hosts) == []


def test_an_emptied_folder_does_not_fill_the_screen() -> None:
    phrases = [f"shard_{i:05d}.parquet is missing" for i in range(100)]
    printed = filters.dataset_phrases(phrases)
    assert printed.startswith("shard_00000.parquet is missing; ")
    assert printed.endswith("; and 95 more")


def test_the_host_with_other_rows_is_named() -> None:
    def packed(digest: str, train: str = "t" * 64) -> dict[str, object]:
        line = json.dumps({"digest": digest, "train_sha256": train, "packed": True})
        return {"__dataset_packed": {"stdout": f"some words\n{line}\n"}}

    hosts = {
        "a": packed("a" * 64),
        "b": packed("b" * 64),
        "c": packed("a" * 64),
        "d": {"__dataset_packed": {"skipped": True}},
    }
    found = filters.dataset_rows_findings(list(hosts), hosts)
    assert len(found) == 1
    assert found[0].startswith("b has training rows with the digests bbbb")
    other_bytes = {**hosts, "c": packed("a" * 64, "u" * 64), "b": packed("a" * 64)}
    assert [
        printed.split()[0] for printed in filters.dataset_rows_findings(["a", "b", "c"], other_bytes)
    ] == ["c"]
    assert filters.dataset_rows(packed("x")["__dataset_packed"])["packed"] is True  # type: ignore[arg-type]


def test_copies_of_a_folder_have_one_digest_and_links_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "eval_data").mkdir(parents=True)
        (tmp_path / name / "core.yaml").write_text("x")
        (tmp_path / name / "eval_data" / "t.jsonl").write_text("y")
    a, b = (folder_digest(tmp_path / name) for name in "ab")
    assert a == b
    assert (a["found"], a["files"], a["bytes"]) == (True, 2, 2)
    (tmp_path / "b" / "eval_data" / "t.jsonl").rename(tmp_path / "b" / "t.jsonl")
    assert folder_digest(tmp_path / "b")["sha256"] != a["sha256"]
    assert folder_digest(tmp_path / "c") == {"found": False, "sha256": "", "files": 0, "bytes": 0}
    (tmp_path / "a" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"link is a link\. Replace it"):
        folder_digest(tmp_path / "a")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_digests_that_cannot_be_stored_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    codes = [code, errno.ENOSPC]

    def fails(*_: object) -> None:
        raise OSError(codes.pop(0), "refused")

    monkeypatch.setattr(file_digests, "write_whole", fails)
    (tmp_path / "shard").write_text("text")
    digests = Digests(tmp_path / ".verified.json")
    assert len(digests.sha256("shard", tmp_path / "shard")) == 64
    digests.save()
    with pytest.raises(OSError, match="refused"):
        digests.save()
