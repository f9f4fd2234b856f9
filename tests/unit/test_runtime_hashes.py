"""Committed hashes: they agree with the pins, and a wheel that has another is refused by name."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import runtime_environments as filters
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pins as pins
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pip as pip
from ansible_collections.nanofleet.fleet.plugins.modules import runtime_host, wheelhouse
from role_files import call
from wheels import INDEX, ROLE, ROOT, WHEELHOUSE, make_wheel

from scripts import lock

HASHES = ROOT / "requirements" / "hashes.txt"
SECRET = "https://me:secret@index.example/simple"


def committed(python: str, machine: str, *extras: str) -> dict[str, set[str]]:
    """{name: versions} of the committed packages of some sets on one kind of host."""
    found: dict[str, set[str]] = {}
    for name, version in pins.read_hashes(HASHES, pins.markers_of(python, machine), extras):
        found.setdefault(name, set()).add(str(version))
    return found


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_committed_packages_are_the_pinned_ones_that_the_project_needs(python: str, machine: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sets = {"": project["dependencies"], **project["optional-dependencies"]}
    pinned = pins.read_pins(ROOT / "constraints.txt")
    every = committed(python, machine, *sets, "train-cuda")
    assert every.keys() == pinned.keys(), "constraints.txt or pyproject.toml has changed: make lock"
    for name, versions in every.items():
        assert versions - {f"{pinned[name]}+cpu"} == {pinned[name]}, "constraints.txt has changed: make lock"
    for extra, lines in sets.items():
        here = committed(python, machine, extra)
        for name, needed in wheelhouse.needs(lines, pins.markers_of(python, machine)):
            assert wheelhouse.allows(needed, pinned[name]), f"{needed} is pinned to {pinned[name]}"
            assert name in here, f"extra {extra!r} of pyproject.toml has changed: make lock"
    assert "uv" in committed(python, machine)
    assert "torch" not in committed(python, machine, "", "tracker")


def test_the_cpu_build_of_torch_has_a_committed_hash_for_the_python_of_most_hosts() -> None:
    assert "2.13.0+cpu" in committed("3.11", "x86_64", "train")["torch"]


def test_the_file_shows_for_which_hosts_no_hash_of_torch_is_known() -> None:
    text = HASHES.read_text()
    unknown = set(re.findall(r"^#   Python (\S+) on (\S+)$", text, re.MULTILINE))
    known = set(re.findall(r'\+cpu ; python_version == "(\S+)" and platform_machine == "(\S+)"', text))
    assert unknown | known == {
        (py, machine) for py in ("3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")
    }
    assert not unknown & known
    assert "://" not in text, "where the hashes came from is this machine's own"


@pytest.fixture
def locked(house: dict[str, Any]) -> dict[str, Any]:
    """A wheelhouse whose wheels have committed hashes, all but `old`, whose pin is not the locked version."""
    path = Path(house["hashes"])
    path.write_text(path.read_text().replace("old==0.1", "old==0.0"))
    return house


def another_index(monkeypatch: pytest.MonkeyPatch, *altered: str) -> None:
    """The index serves other files under these names."""
    fetch = wheelhouse.download

    def serve(wanted: list[str], folder: Path, *rest: str) -> None:
        fetch(wanted, folder, *rest)
        for name in altered:
            if list(folder.glob(f"{name}-*")):
                make_wheel(folder, name, INDEX[name][0], body="import os\n")

    monkeypatch.setattr(wheelhouse, "download", serve)


@pytest.mark.parametrize("name", ["speed", "uv"])
def test_a_wheel_with_another_hash_is_refused_by_name(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    another_index(monkeypatch, name)
    with pytest.raises(ValueError, match=rf"{name}-\S+\.whl \(sha256 .* does not match \S+hashes\.txt"):
        wheelhouse.run(locked, False)
    assert not Path(locked["dest"]).exists()


def test_a_wheelhouse_that_was_brought_is_checked_as_well(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own lock agrees with its wheels; only the committed hashes show that one is another."""
    another_index(monkeypatch, "beta")
    unknown = Path(locked["source"]) / "unknown.txt"
    unknown.write_text(Path(locked["hashes"]).read_text().replace("beta==2.0", "beta==1.9"))
    wheelhouse.run({**locked, "hashes": str(unknown)}, False)
    with pytest.raises(ValueError, match=r"beta-2\.0-py3-none-any\.whl .* does not match"):
        wheelhouse.run({**locked, "offline": True}, False)


def test_a_wheel_without_a_committed_hash_is_named_and_can_be_refused(locked: dict[str, Any]) -> None:
    first = wheelhouse.run(locked, False)
    assert first["unverified"] == ["old-0.1-py3-none-any.whl"]
    assert wheelhouse.run(locked, False)["unverified"] == first["unverified"], "each time, not only once"
    with pytest.raises(ValueError, match=r"old-0\.1\S+ has no hash .* wheelhouse_require_hashes"):
        wheelhouse.run({**locked, "require_hashes": True}, False)


def test_a_wheel_that_was_trusted_once_must_stay_the_same(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheelhouse.run(locked, False)
    next(Path(locked["dest"]).glob("old-*")).unlink()
    another_index(monkeypatch, "old")
    with pytest.raises(ValueError, match=r"old-0\.1\S+ is not the file that was first downloaded"):
        wheelhouse.run(locked, False)


def test_an_entry_with_a_marker_holds_for_such_hosts_alone(tmp_path: Path) -> None:
    path = tmp_path / "hashes.txt"
    path.write_text(
        f'torch==2.13.0+cpu ; python_version == "3.11" and platform_machine == "x86_64" \\\n'
        f"    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    )
    for python, machine, known in (("3.11", "x86_64", 2), ("3.12", "x86_64", 0), ("3.11", "aarch64", 0)):
        found = pins.read_hashes(path, pins.markers_of(python, machine), ["train"])
        assert sum(map(len, found.values())) == known


@pytest.mark.parametrize(
    "line", ["numpy==2.4.6", "numpy>=2 --hash=sha256:" + "a" * 64, "numpy==2.4.6 --hash=sha256:ab"]
)
def test_a_line_without_a_pin_or_a_hash_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hashes.txt"
    path.write_text(line + "\n")
    with pytest.raises(
        ValueError, match=r"with hashes\. The file is out of date or was edited\. Fix: make lock"
    ):
        pins.read_hashes(path, pins.markers_of("3.11", "x86_64"), ["train"])


def test_a_package_of_no_extra_is_refused_as_every_host_would_install_it(tmp_path: Path) -> None:
    path = tmp_path / "hashes.txt"
    path.write_text(f"uv==0.1 --hash=sha256:{'a' * 64}\nansible==12.0 --hash=sha256:{'a' * 64}\n")
    with pytest.raises(ValueError, match=r"ansible==12\.0 names no extra\..*Fix: make lock"):
        pins.read_hashes(path, pins.markers_of("3.11", "x86_64"), ["train"])


def test_an_index_with_a_password_is_on_no_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[list[str], str, int]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        file = Path(command[command.index("--requirement") + 1])
        seen.append((command, file.read_text(), stat.S_IMODE(file.stat().st_mode)))
        return subprocess.CompletedProcess(
            command, 1, "", "ERROR: No matching distribution found for torch==2"
        )

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="has no wheel") as refused:
        pip.download(["torch==2"], tmp_path, "3.11", "x86_64", SECRET)
    [(command, text, mode)] = seen
    assert "secret" not in " ".join(command) + str(refused.value)
    assert text.splitlines() == [f"--extra-index-url {SECRET}", "torch==2"]
    assert mode == 0o600


def test_an_index_with_a_password_is_sent_to_no_host_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [read, note] = yaml.safe_load((ROLE / "tasks" / "facts.yml").read_text())
    assert "index" not in json.dumps(read), "the arguments of a process on a host are everybody's to read"
    assert note["no_log"] is True
    seen = call(runtime_host, monkeypatch, python=sys.executable, user="root", folders=["/"])["host"]
    assert seen["account"]["home"] == "/root"
    assert seen["python"] == ".".join(map(str, sys.version_info[:2]))
    assert filters.runtime_kind(
        {"python": "3.11", "machine": "x86_64"}, "cuda", "https://me:secret@index.example"
    ) == {"name": "3.11-x86_64-cuda", "python": "3.11", "machine": "x86_64", "torch": "cuda"}
    [make, publish] = yaml.safe_load((WHEELHOUSE / "tasks" / "main.yml").read_text())
    assert "index" not in json.dumps([make["loop"], make["loop_control"], publish]), "an item is shown"
    assert make["delegate_to"] == "localhost"


def test_the_scripts_put_no_index_on_a_command_line_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make venv with TORCH_INDEX_URL, and make lock; a stand-in for Python keeps what it was called with."""
    seen: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        assert settings["env"]["UV_INDEX"] == SECRET
        return subprocess.CompletedProcess(command, 0, f"torch==2+cpu --hash=sha256:{'a' * 64}", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert lock.torch_hashes("2", SECRET, "3.11", "x86_64") == ["a" * 64]
    assert "secret" not in str(seen)
    monkeypatch.undo()

    checkout, calls = tmp_path / "checkout", tmp_path / "calls"
    (checkout / "scripts").mkdir(parents=True)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts/bootstrap.sh", "pyproject.toml", "constraints.txt"):
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{calls}\n'
        f'for each in "$@"; do test ! -f "$each" || cat "$each" >>{calls}.files; done\n'
    )
    python.chmod(0o755)
    settings = {**os.environ, "TORCH_INDEX_URL": SECRET, "PYTHON": sys.executable}
    subprocess.run(["sh", "scripts/bootstrap.sh", "venv"], cwd=checkout, env=settings, check=True)
    assert "secret" not in calls.read_text()
    assert f"--extra-index-url {SECRET}" in Path(f"{calls}.files").read_text().splitlines()


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A small project for `make lock`: {requirement lines: what `uv pip compile` resolves them to}."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "nanofleet"\ndependencies = ["alpha"]\n'
        '[project.optional-dependencies]\ntrain = ["torch", "beta"]\ndev = ["beta"]\n'
    )
    digest = f" --hash=sha256:{'a' * 64}\n"
    answers = {
        "alpha": f"alpha==1.0{digest}gone==1 ; sys_platform == 'win32'{digest}",
        "torch\nbeta": f"torch==2.0{digest}triton==3.0 ; sys_platform == 'linux'{digest}"
        f"beta==1.0 ; python_version < '3.12'{digest}uv==1.0{digest}",
        "beta": f"beta==1.0{digest}",
        "torch==2.0+cpu\n": "",
    }
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(lock, "HASHES", tmp_path / "hashes.txt")
    monkeypatch.setattr(lock, "compile_hashes", lambda lines, *options, **_: answers[lines])
    for name in ("TORCH_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    lock.CONSTRAINTS.write_text("alpha==1.0\nbeta==1.0\ntorch==2.0\ntriton==3.0\nuv==1.0\n")
    return answers


def test_make_lock_writes_which_hosts_and_sets_need_a_package(resolved: dict[str, str]) -> None:
    assert lock.main() == 0
    expected = {
        ("3.11", "train"): {"beta", "torch", "uv"},
        ("3.12", "train"): {"torch", "uv"},
        ("3.12", "dev"): {"beta", "uv"},
        ("3.12", "train-cuda"): {"triton", "uv"},
        ("3.13", ""): {"alpha", "uv"},
    }
    for (python, extra), names in expected.items():
        found = pins.read_hashes(lock.HASHES, pins.markers_of(python, "aarch64"), [extra])
        assert {name for name, _ in found} == names, (python, extra)
    assert "#   Python 3.13 on aarch64\n" in lock.HASHES.read_text(), "no hash of torch's CPU build"


def test_make_lock_refuses_a_package_that_is_not_pinned(resolved: dict[str, str]) -> None:
    lock.CONSTRAINTS.write_text(lock.CONSTRAINTS.read_text().replace("triton==3.0\n", ""))
    with pytest.raises(lock.LockError, match=r"extra 'train' needs triton 3\.0, which \S+ does not pin"):
        lock.main()
