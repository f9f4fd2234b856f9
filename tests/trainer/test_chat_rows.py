"""Rows of conversations: nothing is cut or lost, the targets are those of nanochat, a weight repeats."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_chat import GOLDEN, byte_tokenizer
from reference import fill_by_formula

from trainer.__main__ import main
from trainer.data import DataError
from trainer.data.chat_directory import Source, prepare_conversations
from trainer.data.chat_rows import chat_rows, encode
from trainer.data.corpus import read_manifest
from trainer.data.dataset import Dataset
from trainer.data.loader import Split, batch_rows, count_targets, read_batch, read_sequences, row_sums
from trainer.data.packing import fill_padded_rows
from trainer.data.rows import pack
from trainer.data.sources import shard_texts
from trainer.model.gpt import GPT, GPTConfig


def conversation(number: int, words: int = 3) -> list[dict[str, str]]:
    answer = " ".join([f"answer {number}"] * words)
    return [{"role": "user", "content": f"question {number}?"}, {"role": "assistant", "content": answer}]


def write(path: Path, numbers: range, words: int = 3) -> Path:
    path.write_text("".join(json.dumps(conversation(number, words)) + "\n" for number in numbers))
    return path


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    byte_tokenizer().save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def stored(data_dir: Path, split: str) -> list[str]:
    shards = [shard for shard in read_manifest(data_dir)["shards"] if shard["split"] == split]
    return [
        text
        for shard in shards
        for batch in shard_texts(data_dir / "shards" / shard["name"])
        for text in batch
    ]


def sequences(rows: np.ndarray) -> Any:
    split = Split(rows, row_sums(rows), "rows", masked=True)
    return read_sequences(split, np.arange(len(rows)))


def test_batches_losses_and_gradients_are_those_of_nanochat() -> None:
    """Upstream's list wraps around. Its loss is the mean over the targets of a batch, as ours is."""
    texts = itertools.cycle(json.dumps(each["messages"]) for each in GOLDEN["conversations"])
    rows, T = GOLDEN["B"], GOLDEN["T"]
    encoded = encode(texts, byte_tokenizer(), T + 1, Counter())
    packed = fill_padded_rows(encoded, T + 1, byte_tokenizer().bos_id)
    model = GPT(GPTConfig(**GOLDEN["config"]))
    model.init_weights()
    fill_by_formula(model)
    for expected in GOLDEN["batches"]:
        tokens, targets = sequences(np.stack(list(itertools.islice(packed, rows))))
        assert tokens[:, :-1].tolist() == expected["inputs"]
        assert targets.tolist() == expected["targets"]
        model.zero_grad()
        idx, y = torch.from_numpy(tokens[:, :-1].astype(np.int64)), torch.from_numpy(targets)
        loss = model(idx, y, loss_reduction="sum") / count_targets(targets)
        loss.backward()
        assert loss.item() == pytest.approx(expected["loss"], abs=2e-5)
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
        assert norms == pytest.approx(expected["grad_norms"], rel=1e-4)


def test_no_token_of_a_conversation_is_lost() -> None:
    texts = [json.dumps(conversation(number, 1 + number % 7)) for number in range(300)]
    counts: Counter[str] = Counter()
    rows = np.stack(list(chat_rows(texts, byte_tokenizer(), 200, counts)))
    tokens, targets = sequences(rows)
    bos = byte_tokenizer().bos_id
    assert (tokens[:, 0] == bos).all()
    printed = "".join(bytes(row[row < 256].astype(np.uint8)).decode() for row in tokens)
    assert all(f"question {number}?" in printed for number in range(300))
    whole = [len(tokens) for tokens in encode(texts, byte_tokenizer(), 201, Counter())]
    assert rows.size - sum(whole) == counts["padding"]
    assert count_targets(targets) == counts["targets"]
    assert (targets >= 0).any(axis=1).all()
    assert counts["conversations"] == 300


def test_conversations_are_cut_to_a_row_and_left_out_without_a_target() -> None:
    long = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b"}]
    texts = [json.dumps(conversation(1)), json.dumps(long)]
    counts: Counter[str] = Counter()
    rows = list(chat_rows(texts, byte_tokenizer(), 30, counts))
    assert len(rows) == 1
    assert dict(counts) == {"conversations": 1, "cut": 1, "left_out": 1, "targets": 16, "padding": 0}


def test_a_data_directory_has_weights_and_a_validation_split(tmp_path: Path, tokenizer_dir: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", range(40)), write(tmp_path / "b.jsonl", range(100, 120))
    out = tmp_path / "chats"
    done = prepare_conversations([Source(a), Source(b, 2.5)], out, tokenizer_dir, val_fraction=0.1)
    train, val = stored(out, "train"), stored(out, "val")
    assert len(val) == len(set(val)) == 6
    assert not set(val) & set(train)
    assert set(Counter(train).values()) <= {1, 2, 3}
    assert done.documents == len(train) + 6
    numbers = [int(json.loads(text)[0]["content"].split()[1][:-1]) for text in train]
    assert numbers != sorted(numbers)
    of_b = Counter(number for number in numbers if number >= 100)
    assert sum(of_b.values()) == round(2.5 * len(of_b))
    again = prepare_conversations([Source(a), Source(b, 2.5)], out, tokenizer_dir, val_fraction=0.1)
    assert again.reused == "all"


def test_a_file_for_validation_is_not_trained_on(tmp_path: Path, tokenizer_dir: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", range(5)), write(tmp_path / "b.jsonl", range(100, 103))
    out = tmp_path / "chats"
    prepare_conversations([Source(a)], out, tokenizer_dir, validation=[b])
    assert [len(stored(out, split)) for split in ("train", "val")] == [5, 3]


def test_the_manifest_depends_on_the_content_alone(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Another controller has the same conversations in another folder, at another time."""
    made = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / f"{folder}.jsonl", range(40))
        os.utime(path, (len(folder), len(made)))
        prepare_conversations([Source(path)], tmp_path / folder / "out", tokenizer_dir)
        made.append((tmp_path / folder / "out" / "manifest.json").read_bytes())
    assert made[0] == made[1]


def test_the_batch_of_a_step_has_targets_and_a_checksum_of_the_mask(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    out = tmp_path / "chats"
    prepare_conversations([Source(write(tmp_path / "a.jsonl", range(40)))], out, tokenizer_dir)
    data = Dataset.open(out, 64)
    assert data.info.masked
    assert data.info.counts["train"]["conversations"] == 38
    batch = read_batch(data.train, 42, 3, 4)
    assert batch.tokens.max() < 265
    assert batch.targets.shape == (4, 64)
    trained = batch.targets >= 0
    assert (batch.targets[trained] == batch.tokens[:, 1:][trained]).all()
    rows = np.array(data.train[batch_rows(42, 3, 4, len(data.train))])
    bare = rows & np.uint32(2**31 - 1)
    assert read_batch(bare, 42, 0, len(bare)).checksum != read_batch(rows, 42, 0, len(rows)).checksum
    assert not pack(out, 64).packed


def test_the_command_reports_bad_lines_and_rows(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", range(40))
    path.write_text(path.read_text() + "{\n")
    command = ["conversations", "--conversations", f"{path}=2", "--out", str(tmp_path / "chats")]
    command += ["--tokenizer", str(tokenizer_dir), "--sequence-len", "64"]
    assert main(command) == 2
    assert f"{path}:41: it is not JSON" in capsys.readouterr().err
    assert main([*command, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "78 of them" in out
    assert "bad lines left out: 1" in out
    assert "train:" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--conversations", "a.jsonl=0"], "must be a number above 0"),
        (["--conversations", "a.jsonl=x"], "must be a number above 0"),
        (["--conversations", "a.jsonl", "--val", "b", "--val-fraction", "0.1"], "give one of them"),
        (["--conversations", "a.jsonl", "--val-fraction", "1"], "above 0 and below 1"),
        (["--conversations", "a.jsonl"], "Cannot read a.jsonl"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conversations", "--out", str(tmp_path / "o"), "--tokenizer", "t", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_conversation_is_too_few(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl", range(1))
    with pytest.raises(DataError, match="no conversation for training"):
        prepare_conversations([Source(path)], tmp_path / "chats", tokenizer_dir)
