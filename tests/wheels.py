"""The runtime role's modules, wheels made here, and a wheelhouse for which pip is a stand-in."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.modules import wheelhouse

ROOT = Path(__file__).resolve().parents[1]
ROLE = ROOT / "roles" / "runtime"
WHEELHOUSE = ROOT / "roles" / "wheelhouse"


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), body: str = "") -> Path:
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {f"{name}.py": body, f"{info}/METADATA": metadata}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{each},{record_hash(text)},{len(text)}\n" for each, text in files.items())
    record += f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(each, text)
    return path


def record_hash(text: str) -> str:
    """A file's hash as a wheel's RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


INDEX = {
    "alpha": ("1.0", ("beta[fast]>=1", "gone; sys_platform == 'darwin'", "old; python_version < '3.12'")),
    "beta": ("2.0", ("speed; extra == 'fast'", "slow; extra == 'slow'")),
    "old": ("0.1", ()),
    "speed": ("3.0", ()),
    "uv": ("0.1", ()),
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a wheelhouse in a small tree; what pip is asked for is in asked."""
    tree = tmp_path / "tree"
    (tree / "trainer").mkdir(parents=True)
    (tree / "trainer" / "a.py").write_text("x = 1\n")
    (tree / "pyproject.toml").write_text(
        '[project]\nname = "nanofleet"\n[project.optional-dependencies]\ntrain = ["alpha"]\n'
    )
    (tree / "constraints.txt").write_text("# pins\n" + "".join(f"{n}=={v}\n" for n, (v, _) in INDEX.items()))
    asked: list[str] = []

    def pip(self: Any, wanted: list[str], staging: Path, index: str = "") -> None:
        asked.extend(wanted)
        for each in wanted:
            name, version = each.split(",")[0].split("==")
            make_wheel(staging, name, version, INDEX[name][1])

    def build(self: Any, staging: Path) -> None:
        make_wheel(staging, "nanofleet", "0.1.0", body=(tree / "trainer" / "a.py").read_text())

    monkeypatch.setattr(wheelhouse.Wheelhouse, "_pip", pip)
    monkeypatch.setattr(wheelhouse.Wheelhouse, "_build", build)
    return {
        "source": str(tree),
        "dest": str(tmp_path / "wheels" / "3.11-x86_64" / "train"),
        "constraints": str(tree / "constraints.txt"),
        "hashes": "",
        "require_hashes": False,
        "extra": "train",
        "project": True,
        "python_version": "3.11",
        "architecture": "x86_64",
        "torch": "cpu",
        "torch_index": "",
        "offline": False,
        "asked": asked,
    }


def names(dest: str) -> list[str]:
    return sorted(path.name.split("-")[0] for path in Path(dest).glob("*.whl"))
