"""Committed hashes: they agree with the pins, and a wheel that has another is refused by name."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import runtime_environments as filters
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_hashes as hashes
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_lock as locks
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pins as pins
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pip as pip
from ansible_collections.nanofleet.fleet.plugins.modules import runtime_host, wheelhouse
from packaging.version import Version
from role_files import call
from wheels import INDEX, ROLE, ROOT, WHEELHOUSE, make_wheel

from scripts import lock

HASHES = ROOT / "requirements" / "hashes.txt"
SECRET = "https://me:secret@index.example/simple"


def committed(python: str = "3.11", machine: str = "x86_64") -> hashes.Hashes:
    return hashes.read_hashes(HASHES, pins.markers_of(python, machine))


def test_the_committed_hashes_are_those_of_the_pinned_versions() -> None:
    pinned = {(name, Version(version)) for name, version in pins.read_pins(ROOT / "constraints.txt").items()}
    torch = next(version for name, version in pinned if name == "torch")
    cpu = ("torch", Version(f"{torch}+cpu"))
    for python in ("3.11", "3.12", "3.13"):
        for machine in ("x86_64", "aarch64"):
            assert committed(python, machine).keys() - {cpu} == pinned, (
                "constraints.txt has changed: make lock"
            )
    assert cpu in committed(), "the CPU build for the Python that most hosts have"


def test_the_file_says_for_which_hosts_no_hash_of_torch_is_known() -> None:
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
    """A wheelhouse whose wheels have committed hashes, all but `old`."""
    path, folder = Path(house["source"]) / "hashes.txt", Path(house["source"]) / "wheels"
    folder.mkdir()
    made = [make_wheel(folder, name, *each) for name, each in INDEX.items() if name != "old"]
    wheels = [locks.wheel_of(path) for path in made]
    lines = [f"{each.name}=={each.version} \\\n    --hash=sha256:{each.sha256}\n" for each in wheels]
    path.write_text("# written by make lock\n" + "".join(lines))
    return {**house, "hashes": str(path)}


def another_index(monkeypatch: pytest.MonkeyPatch, *altered: str) -> None:
    """The index serves other files under these names."""
    fetch = wheelhouse.Wheelhouse._pip

    def serve(self: Any, wanted: list[str], staging: Path, index: str = "") -> None:
        fetch(self, wanted, staging, index)
        for name in altered:
            if list(staging.glob(f"{name}-*")):
                make_wheel(staging, name, INDEX[name][0], INDEX[name][1], body="import os\n")

    monkeypatch.setattr(wheelhouse.Wheelhouse, "_pip", serve)


@pytest.mark.parametrize("name", ["speed", "uv"])
def test_a_wheel_with_another_hash_is_refused_by_name(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    another_index(monkeypatch, name)
    with pytest.raises(
        wheelhouse.WheelhouseError, match=rf"{name}-\S+\.whl \(sha256 .* does not match \S+hashes\.txt"
    ):
        wheelhouse.run(locked, False)
    assert not Path(locked["dest"]).exists()


def test_a_wheelhouse_that_was_brought_is_checked_as_well(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own lock agrees with its wheels; only the committed hashes show that one is another."""
    another_index(monkeypatch, "beta")
    wheelhouse.run({**locked, "hashes": ""}, False)
    with pytest.raises(wheelhouse.WheelhouseError, match=r"beta-2\.0-py3-none-any\.whl .* does not match"):
        wheelhouse.run({**locked, "offline": True}, False)


def test_a_wheel_without_a_committed_hash_is_named_and_can_be_refused(locked: dict[str, Any]) -> None:
    first = wheelhouse.run(locked, False)
    assert first["unverified"] == ["old-0.1-py3-none-any.whl"]
    assert wheelhouse.run(locked, False)["unverified"] == first["unverified"], "each time, not only once"
    with pytest.raises(
        wheelhouse.WheelhouseError, match=r"old-0\.1\S+ has no hash .* wheelhouse_require_hashes"
    ):
        wheelhouse.run({**locked, "require_hashes": True}, False)


def test_a_wheel_that_was_trusted_once_must_stay_the_same(
    locked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheelhouse.run(locked, False)
    next(Path(locked["dest"]).glob("old-*")).unlink()
    another_index(monkeypatch, "old")
    with pytest.raises(
        wheelhouse.WheelhouseError, match=r"old-0\.1\S+ is not the file that was first downloaded"
    ):
        wheelhouse.run(locked, False)


def test_an_entry_with_a_marker_holds_for_such_hosts_alone(tmp_path: Path) -> None:
    path = tmp_path / "hashes.txt"
    path.write_text(
        f'torch==2.13.0+cpu ; python_version == "3.11" and platform_machine == "x86_64" \\\n'
        f"    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    )
    wheel = locks.Wheel("torch", "2.13.0+cpu", "c" * 64, "torch-2.13.0+cpu-cp311.whl", 1)
    for python, machine, altered in (
        ("3.11", "x86_64", [wheel]),
        ("3.12", "x86_64", []),
        ("3.11", "aarch64", []),
    ):
        found = hashes.judge([wheel], hashes.read_hashes(path, pins.markers_of(python, machine)))
        assert found == (altered, [] if altered else [wheel])


@pytest.mark.parametrize(
    "line", ["numpy==2.4.6", "numpy>=2 --hash=sha256:" + "a" * 64, "numpy==2.4.6 --hash=sha256:ab"]
)
def test_a_line_without_a_pin_or_a_hash_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hashes.txt"
    path.write_text(line + "\n")
    with pytest.raises(
        ValueError, match=r"with hashes\. The file is out of date or was edited\. Fix: make lock"
    ):
        hashes.read_hashes(path, pins.markers_of("3.11", "x86_64"))


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
    with pytest.raises(pip.PipError) as refused:
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
