"""Which build of torch a host gets, and from which index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_lock as locks
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pins as pins
from ansible_collections.nanofleet.fleet.plugins.modules import wheelhouse
from wheels import ROOT, make_wheel

# Requires-Dist of torch 2.13.0's CUDA build, as the index has it, and part of its cuda-toolkit's.
TORCH_CUDA = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
    "cuda-toolkit[cublas,cudart,nvjitlink]==13.0.3 ; sys_platform == 'linux'",
    "cuda-bindings>=13.0.3,<14 ; python_full_version < '3.15' and sys_platform == 'linux'",
    "nvidia-cudnn-cu13==9.20.0.48 ; sys_platform == 'linux'",
    "nvidia-cusparselt-cu13==0.8.1 ; sys_platform == 'linux'",
    "nvidia-nccl-cu13==2.29.7 ; sys_platform == 'linux'",
    "nvidia-nvshmem-cu13==3.4.5 ; sys_platform == 'linux'",
    "triton==3.7.1 ; python_full_version < '3.15' and sys_platform == 'linux'",
    "pyyaml ; extra == 'pyyaml'",
)
ON_LINUX = (
    "platform_machine == 'aarch64' and extra == '{0}' or platform_machine == 'x86_64' and extra == '{0}'"
)
TOOLKIT = tuple(
    f"{what} ; {ON_LINUX.format(extra)}"
    for what, extra in (
        ("nvidia-cublas==13.1.1.3.*", "cublas"),
        ("nvidia-cuda-runtime==13.0.96.*", "cudart"),
        ("nvidia-nvjitlink>=13.0.88,<14", "nvjitlink"),
        ("nvidia-npp==13.0.1.2.*", "npp"),
    )
)
OTHER_CUDA = ("nvidia-cublas-cu12==12.6.4.1; platform_system == 'Linux'",)


@pytest.fixture
def cuda(house: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A wheelhouse with the real pins whose project needs torch; `indexes` is where pip was sent for what."""
    (Path(house["source"]) / "pyproject.toml").write_text(
        '[project]\nname = "nanofleet"\n[project.optional-dependencies]\ntrain = ["torch>=2.9"]\n'
    )
    indexes: dict[str, str] = {}

    def pip(self: Any, wanted: list[str], staging: Path, index: str = "") -> None:
        for each in wanted:
            indexes[each] = index
            name, version = each.split(",")[0].split("==")
            requires = {"torch": OTHER_CUDA if index else TORCH_CUDA, "cuda-toolkit": TOOLKIT}.get(name, ())
            label = "+" + index.rstrip("/").rsplit("/", 1)[-1] if index else ""
            make_wheel(staging, name.replace("-", "_"), version + label, requires)

    monkeypatch.setattr(wheelhouse.Wheelhouse, "_pip", pip)
    return {**house, "constraints": str(ROOT / "constraints.txt"), "torch": "cuda", "indexes": indexes}


def test_a_cuda_host_gets_every_pinned_package_of_the_cuda_build(cuda: dict[str, Any]) -> None:
    wheelhouse.run(cuda, False)
    pinned = pins.read_pins(ROOT / "constraints.txt")
    lock = {wheel.name: wheel.version for wheel in locks.read_lock(Path(cuda["dest"]) / locks.REQUIREMENTS)}
    assert {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nvjitlink", "triton"} <= lock.keys()
    assert "nvidia-npp" not in lock, "an extra that torch does not ask for"
    assert all(lock[name] == pinned[name] for name in lock if name != "nanofleet")
    # The configured indexes may hold a CPU build as well, and pip would prefer it for its label.
    assert f"torch=={pinned['torch']},!={pinned['torch']}+cpu" in cuda["indexes"]
    assert not wheelhouse.run(cuda, False)["changed"]


def test_another_cuda_version_comes_from_its_index_with_the_packages_it_pins_itself(
    cuda: dict[str, Any],
) -> None:
    index = "https://download.pytorch.org/whl/cu126"
    wheelhouse.run({**cuda, "torch_index": index}, False)
    lock = {wheel.name: wheel.version for wheel in locks.read_lock(Path(cuda["dest"]) / locks.REQUIREMENTS)}
    assert lock["torch"].endswith("+cu126")
    assert lock["nvidia-cublas-cu12"] == "12.6.4.1"
    assert [asked for asked, where in cuda["indexes"].items() if where] == [
        asked for asked in cuda["indexes"] if asked.startswith("torch==")
    ]


def test_a_cpu_host_names_its_build_and_asks_torchs_index_only_where_it_is_missing(
    house: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def fetch(wanted: list[str], folder: Path, python: str, machine: str, index: str = "") -> None:
        asked.append((wanted[0], index))
        if wanted[0].startswith("torch") and not index:
            raise wheelhouse.PipError("none there")
        make_wheel(folder, *wanted[0].split("=="))

    monkeypatch.undo()
    monkeypatch.setattr(wheelhouse, "download", fetch)
    made = wheelhouse.Wheelhouse({**house, "torch_index": "https://index", "extra": "train"})
    made.versions = {"torch": "2.13.0", "beta": "2.0"}
    made._fetch({"beta", "torch"}, Path(house["source"]))
    assert asked == [("beta==2.0", ""), ("torch==2.13.0+cpu", ""), ("torch==2.13.0+cpu", "https://index")]
