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
            archive.writestr(zipfile.ZipInfo(each), text)
    return path


def record_hash(text: str) -> str:
    """A file's hash as a wheel's RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


# name: version, and the marker under which the extra train of the project's tree below needs it
INDEX = {
    "alpha": ("1.0", ' ; extra == "train"'),
    "beta": ("2.0", ' ; extra == "train"'),
    "old": ("0.1", ' ; python_version < "3.12" and extra == "train"'),
    "slow": ("4.0", ' ; extra == "dev"'),
    "speed": ("3.0", ' ; extra == "train" or extra == "dev"'),
    "uv": ("0.1", ""),
}


def write_hashes(path: Path) -> None:
    """Write a file as `make lock` does, with the packages of INDEX and the hashes of their wheels."""
    lines = ["# Written by: make lock\n"]
    for name, (version, marker) in INDEX.items():
        wheel = make_wheel(path.parent, name, version)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        wheel.unlink()
        lines.append(f"{name}=={version}{marker} \\\n    --hash=sha256:{digest}\n")
    path.write_text("".join(lines))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a wheelhouse in a small tree; `asked` has the requirements that pip is called with."""
    tree = tmp_path / "tree"
    (tree / "trainer").mkdir(parents=True)
    (tree / "trainer" / "a.py").write_text("x = 1\n")
    (tree / "pyproject.toml").write_text(
        '[project]\nname = "nanofleet"\n[project.optional-dependencies]\ntrain = ["alpha", "beta>=1"]\n'
    )
    (tree / "constraints.txt").write_text("# pins\n" + "".join(f"{n}=={v}\n" for n, (v, _) in INDEX.items()))
    write_hashes(tree / "hashes.txt")
    asked: list[str] = []

    def download(wanted: list[str], folder: Path, python: str, machine: str, index: str) -> None:
        asked.extend(wanted)
        for each in wanted:
            make_wheel(folder, *each.split("=="))

    def build(self: Any, folder: Path) -> None:
        make_wheel(folder, "nanofleet", "0.1.0", body=(tree / "trainer" / "a.py").read_text())

    monkeypatch.setattr(wheelhouse, "download", download)
    monkeypatch.setattr(wheelhouse.Wheelhouse, "_build", build)
    return {
        "source": str(tree),
        "dest": str(tmp_path / "wheels" / "3.11-x86_64" / "train"),
        "constraints": str(tree / "constraints.txt"),
        "hashes": str(tree / "hashes.txt"),
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
