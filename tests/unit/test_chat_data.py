"""The request for a fine-tuning, checked on the controller before a host is contacted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import chat_data
from ansible_collections.nanofleet.fleet.plugins.module_utils.chat_data import Source, sources_of

ROOT = Path(__file__).resolve().parents[2]
NONE = {"stage": "sft", "from_run": "", "from_checkpoint": "", "conversations": ""}


@pytest.mark.parametrize(
    ("request_", "codes"),
    [
        ({"stage": "base"}, []),
        ({"stage": "base", "from_run": "first"}, ["NF008"]),
        ({"stage": "base", "conversations": "a.jsonl"}, ["NF008"]),
        ({}, ["NF009", "NF022"]),
        ({"from_run": "first"}, ["NF022"]),
        ({"conversations": "a.jsonl"}, ["NF009"]),
        ({"from_run": "first", "from_checkpoint": "a/step_1", "conversations": "a"}, ["NF021"]),
        ({"from_run": "first", "conversations": "a"}, []),
    ],
)
def test_settings_that_belong_together(request_: dict[str, str], codes: list[str]) -> None:
    findings = list(chat_data.request_findings({**NONE, **request_}))
    assert [finding["code"] for finding in findings] == codes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "more").mkdir()
    for name in ("chats.jsonl", "odd=2.jsonl", "more/a.jsonl", "more/notes.txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_files_and_weights_are_read(folder: Path) -> None:
    assert sources_of("chats.jsonl, more=0.5,odd=2.jsonl,/gone.jsonl=3", folder) == [
        Source(folder / "chats.jsonl", ""),
        Source(folder / "more", "0.5"),
        Source(folder / "odd=2.jsonl", ""),
        Source(Path("/gone.jsonl"), "3"),
    ]
    options = chat_data.command_options([Source(Path("/a"), ""), Source(Path("/b"), "2")], folder, True)
    assert options == ["--conversations", "/a", "--conversations", "/b=2", "--tokenizer", str(folder),
                       "--skip-bad"]  # fmt: skip


def test_missing_files_are_named(folder: Path) -> None:
    sources = sources_of("chats.jsonl,gone.jsonl", folder)
    assert [each["code"] for each in chat_data.file_findings(sources, folder / "tokenizer")] == ["NF613"]
    assert [each["code"] for each in chat_data.file_findings(sources[:1], folder)] == ["NF614"]


def test_the_directory_is_bound_to_the_content(folder: Path) -> None:
    tokenizer = folder / "tokenizer"
    digest = chat_data.chat_digest(sources_of("chats.jsonl,more", folder), tokenizer, False)
    os.utime(folder / "chats.jsonl", (1, 1))
    (folder / "more" / "notes.txt").write_text("changed")
    assert chat_data.chat_digest(sources_of("chats.jsonl,more", folder), tokenizer, False) == digest
    others = [
        chat_data.chat_digest(sources_of("chats.jsonl,more=2", folder), tokenizer, False),
        chat_data.chat_digest(sources_of("chats.jsonl,more", folder), tokenizer, True),
    ]
    (folder / "more" / "a.jsonl").write_text("changed")
    others.append(chat_data.chat_digest(sources_of("chats.jsonl,more", folder), tokenizer, False))
    (tokenizer / "tokenizer.json").write_text("[]")
    others.append(chat_data.chat_digest(sources_of("chats.jsonl,more", folder), tokenizer, False))
    assert len({digest, *others}) == 5


def refusal(tmp_path: Path, *options: str) -> str:
    """What train.yml prints with these settings for hosts that nobody can reach."""
    hosts = tmp_path / "hosts.yml"
    hosts.write_text(
        "fleet: {children: {coordinator: {hosts: {tower: {ansible_host: 192.0.2.1}}}, workers: {hosts: {}}}}"
    )
    words = [word for option in options for word in ("-e", option)]
    done = subprocess.run(
        ["ansible-playbook", "-i", str(hosts), "train.yml", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip
    assert done.returncode, done.stdout
    assert "UNREACHABLE" not in done.stdout
    return " ".join(done.stdout.split())


@pytest.mark.processes
def test_train_yml_refuses_a_bad_request_before_a_host_is_contacted(folder: Path) -> None:
    assert "NF009" in refusal(folder, "stage=sft", f"conversations={folder}/chats.jsonl")
    assert "NF008" in refusal(folder, "from_run=first")
    data = f"data_dir={folder}"
    (folder / "manifest.json").write_text("{}")
    gone = refusal(folder, "stage=sft", "from_run=first", f"conversations={folder}/gone.jsonl", data)
    assert f"There is no file or folder {folder}/gone.jsonl" in gone
