"""Which build of torch a host gets, and from which index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_lock as locks
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pins as pins
from ansible_collections.nanofleet.fleet.plugins.modules import wheelhouse
from wheels import ROOT, make_wheel

# Part of Requires-Dist of torch 2.13.0's CUDA builds, as the indexes have it.
TORCH_CUDA = (
    "filelock",
    "typing-extensions>=4.10.0",
    "cuda-toolkit[cublas,cudart,nvjitlink]==13.0.3 ; sys_platform == 'linux'",
    "cuda-bindings>=13.0.3,<14 ; python_full_version < '3.15' and sys_platform == 'linux'",
    "nvidia-cudnn-cu13==9.20.0.48 ; sys_platform == 'linux'",
    "triton==3.7.1 ; python_full_version < '3.15' and sys_platform == 'linux'",
    "pyyaml ; extra == 'pyyaml'",
)
OTHER_CUDA = ("filelock", "nvidia-cublas-cu12==12.6.4.1; platform_system == 'Linux'", "triton==3.7.1")


@pytest.fixture
def cuda(house: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A wheelhouse of the real project with the real pins; `indexes` is where pip was sent for what."""
    (Path(house["source"]) / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    indexes: dict[str, str] = {}

    def download(wanted: list[str], folder: Path, python: str, machine: str, index: str) -> None:
        for each in wanted:
            indexes[each] = index
            name, version = each.split(",")[0].split("==")
            label = "+" + index.rstrip("/").rsplit("/", 1)[-1] if index else ""
            requires = OTHER_CUDA if "cu126" in label else TORCH_CUDA
            make_wheel(folder, name.replace("-", "_"), version + label, requires if name == "torch" else ())

    monkeypatch.setattr(wheelhouse, "download", download)
    monkeypatch.setattr(wheelhouse.Wheelhouse, "_check", lambda self, wheels, old: None)  # no real files
    real = {"constraints": str(ROOT / "constraints.txt"), "hashes": str(ROOT / "requirements" / "hashes.txt")}
    return {**house, **real, "torch": "cuda", "indexes": indexes}


def locked(cuda: dict[str, Any]) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in locks.read_lock(Path(cuda["dest"]) / locks.REQUIREMENTS)}


def test_a_cuda_host_gets_every_pinned_package_of_the_cuda_build(cuda: dict[str, Any]) -> None:
    wheelhouse.run(cuda, False)
    pinned = pins.read_pins(ROOT / "constraints.txt")
    lock = locked(cuda)
    assert {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nvjitlink", "triton"} <= lock.keys()
    assert all(lock[name] == pinned[name] for name in lock if name != "nanofleet")
    # The configured indexes may hold a CPU build as well, and pip would prefer it for its label.
    assert f"torch=={pinned['torch']},!={pinned['torch']}+cpu" in cuda["indexes"]
    assert not wheelhouse.run(cuda, False)["changed"]


def test_another_cuda_version_comes_from_its_index_with_the_packages_it_pins_itself(
    cuda: dict[str, Any],
) -> None:
    index = "https://download.pytorch.org/whl/cu126"
    wheelhouse.run({**cuda, "torch_index": index}, False)
    lock = locked(cuda)
    assert lock["torch"].endswith("+cu126")
    assert lock["nvidia-cublas-cu12"] == "12.6.4.1"
    assert lock["triton"] == "3.7.1"
    assert not {"nvidia-cublas", "cuda-toolkit"} & lock.keys(), "packages of the locked CUDA version"
    assert not wheelhouse.run({**cuda, "torch_index": index}, False)["changed"]
    assert [asked for asked, where in cuda["indexes"].items() if where] == [
        asked for asked in cuda["indexes"] if asked.startswith("torch==")
    ]


def test_an_index_with_the_locked_cuda_version_serves_the_locked_packages(cuda: dict[str, Any]) -> None:
    wheelhouse.run({**cuda, "torch_index": "https://download.pytorch.org/whl/cu130"}, False)
    lock = locked(cuda)
    assert lock["torch"].endswith("+cu130")
    assert {"nvidia-cublas", "cuda-toolkit", "triton"} <= lock.keys()


def test_a_build_that_leaves_a_package_open_is_refused(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = ("cuda-toolkit[cublas]==12.8.1",)
    monkeypatch.setitem(globals(), "OTHER_CUDA", toolkit)
    with pytest.raises(ValueError, match=r"needs cuda-toolkit\[cublas\]==12.8.1, which"):
        wheelhouse.run({**cuda, "torch_index": "https://download.pytorch.org/whl/cu126"}, False)


def test_a_cpu_host_has_no_package_of_the_cuda_build(cuda: dict[str, Any]) -> None:
    wheelhouse.run({**cuda, "torch": "cpu"}, False)
    assert "torch" in locked(cuda)
    assert not [name for name in locked(cuda) if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_a_cpu_host_names_its_build_and_asks_torchs_index_only_where_it_is_missing(
    house: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def download(wanted: list[str], folder: Path, python: str, machine: str, index: str) -> None:
        asked.append((wanted[0], index))
        if wanted[0].startswith("torch") and not index:
            raise ValueError("none there")

    monkeypatch.setattr(wheelhouse, "download", download)
    made = wheelhouse.Wheelhouse({**house, "torch_index": "https://index"})
    made.wanted = {"torch": "2.13.0", "beta": "2.0"}
    made._fetch({"torch"}, Path(house["source"]))
    made._fetch({"beta"}, Path(house["source"]))
    assert asked == [("torch==2.13.0+cpu", ""), ("torch==2.13.0+cpu", "https://index"), ("beta==2.0", "")]
