"""The wheelhouse and the locked environment, without an index: wheels are made here and pip is a stand-in."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest
from role_files import load

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "runtime"
sys.path.insert(0, str(ROLE / "module_utils"))
ansible.module_utils.__path__.append(str(ROLE / "module_utils"))


wheelhouse = load(ROLE / "library" / "wheelhouse.py")
locked_venv = load(ROLE / "library" / "locked_venv.py")
filters = load(ROLE / "filter_plugins" / "runtime.py")
locks = importlib.import_module("ansible.module_utils.nanofleet_lock")
pins = importlib.import_module("ansible.module_utils.nanofleet_pins")
pip = importlib.import_module("ansible.module_utils.nanofleet_pip")


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


def test_requirements_follow_the_hosts_markers_and_extras(house: dict[str, Any]) -> None:
    assert wheelhouse.run(house, False)["changed"]
    assert names(house["dest"]) == ["alpha", "beta", "nanofleet", "old", "speed", "uv"]
    newer = {**house, "python_version": "3.12", "dest": house["dest"].replace("3.11", "3.12")}
    wheelhouse.run(newer, False)
    assert "old" not in names(newer["dest"])


def test_lock_has_all_but_the_tool(house: dict[str, Any]) -> None:
    wheelhouse.run(house, False)
    lock = locks.read_lock(Path(house["dest"]) / locks.REQUIREMENTS)
    assert [wheel.name for wheel in lock] == ["alpha", "beta", "nanofleet", "old", "speed"]
    assert [wheel.name for wheel in locks.read_lock(Path(house["dest"]) / locks.TOOLS)] == ["uv"]


def test_second_run_asks_nothing_and_sources_alone_rebuild_only_the_project(house: dict[str, Any]) -> None:
    first = wheelhouse.run(house, False)
    house["asked"].clear()
    second = wheelhouse.run(house, False)
    assert (second["changed"], second["digest"]) == (False, first["digest"])
    (Path(house["source"]) / "trainer" / "a.py").write_text("x = 2\n")
    third = wheelhouse.run(house, False)
    assert third["changed"]
    assert third["digest"] != first["digest"]
    assert house["asked"] == []


def test_a_new_pin_fetches_that_package_alone(house: dict[str, Any]) -> None:
    wheelhouse.run(house, False)
    house["asked"].clear()
    path = Path(house["constraints"])
    path.write_text(path.read_text().replace("beta==2.0", "beta==2.1"))
    wheelhouse.run(house, False)
    assert house["asked"] == ["beta==2.1"]
    assert len(list(Path(house["dest"]).glob("beta-*"))) == 1


def test_check_mode_makes_nothing(house: dict[str, Any], tmp_path: Path) -> None:
    result = wheelhouse.run(house, True)
    assert (result["changed"], result["digest"]) == (True, "")
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize(("bytes_", "phrase"), [(b"short", "has 5 bytes instead of"), (None, "was altered")])
def test_a_bad_wheel_is_named_and_not_replaced(
    house: dict[str, Any], bytes_: bytes | None, phrase: str
) -> None:
    wheelhouse.run(house, False)
    path = next(Path(house["dest"]).glob("beta-*"))
    content = path.read_bytes()
    path.write_bytes(bytes_ or content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(wheelhouse.WheelhouseError, match=rf"beta-2\.0.*{phrase}"):
        wheelhouse.run(house, False)
    path.unlink()
    assert wheelhouse.run(house, False)["changed"]
    assert locks.faults(Path(house["dest"])) == []


def test_a_failure_leaves_no_half_wheelhouse(house: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = wheelhouse.run(house, False)
    (Path(house["source"]) / "trainer" / "a.py").write_text("x = 3\n")

    def broken(self: Any, staging: Path) -> None:
        raise wheelhouse.WheelhouseError("no")

    monkeypatch.setattr(wheelhouse.Wheelhouse, "_build", broken)
    with pytest.raises(wheelhouse.WheelhouseError):
        wheelhouse.run(house, False)
    dest = Path(house["dest"])
    assert locks.sha256_of(dest / locks.REQUIREMENTS) == first["digest"]
    assert [path.name for path in dest.parent.iterdir() if path.is_dir()] == ["train"]


def test_an_unpinned_requirement_is_a_sentence(house: dict[str, Any]) -> None:
    path = Path(house["constraints"])
    path.write_text(path.read_text().replace("speed==3.0\n", ""))
    with pytest.raises(wheelhouse.WheelhouseError, match=r"speed is needed .* but not pinned"):
        wheelhouse.run(house, False)


def test_an_unknown_extra_names_those_there_are(house: dict[str, Any]) -> None:
    with pytest.raises(wheelhouse.WheelhouseError, match="no extra 'nope'; it has: train"):
        wheelhouse.run({**house, "extra": "nope"}, False)


def test_every_dependency_of_the_project_is_pinned() -> None:
    """The direct dependencies of all extras; the rest is checked whenever a wheelhouse is made."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(r for group in project["optional-dependencies"].values() for r in group),
    ]
    pinned = pins.read_pins(ROOT / "constraints.txt")
    markers = pins.markers_of("3.11", "x86_64")
    assert {need.name for need in pins.needed(lines, markers)} <= pinned.keys()


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


def test_without_a_network_every_missing_wheel_is_named_with_how_to_make_it(house: dict[str, Any]) -> None:
    offline = {**house, "offline": True}
    with pytest.raises(wheelhouse.WheelhouseError) as refused:
        wheelhouse.run(offline, False)
    assert "lacks alpha==1.0, uv==0.1 (and what only these need)" in str(refused.value)
    assert "scripts/wheelhouse.py --python 3.11 --machine x86_64, then bring" in str(refused.value)
    assert house["asked"] == []

    wheelhouse.run(house, False)
    elsewhere = Path(house["dest"])
    brought = elsewhere.parents[1] / "brought" / "train"
    shutil.copytree(elsewhere, brought)
    assert not wheelhouse.run({**offline, "dest": str(brought)}, False)["changed"]
    # Sources that have changed need no index; a wheel that was lost on the way is named.
    (Path(house["source"]) / "trainer" / "a.py").write_text("x = 4\n")
    next(brought.glob("speed-*")).unlink()
    with pytest.raises(wheelhouse.WheelhouseError, match=r"lacks speed==3\.0 "):
        wheelhouse.run({**offline, "dest": str(brought)}, False)


def test_a_pin_that_does_not_meet_a_requirement_is_a_sentence(house: dict[str, Any]) -> None:
    path = Path(house["constraints"])
    path.write_text(path.read_text().replace("beta==2.0", "beta==0.5"))
    with pytest.raises(wheelhouse.WheelhouseError, match=r"beta is needed .* pinned to 0\.5 instead of >=1"):
        wheelhouse.run(house, False)


def test_an_index_is_a_url_or_a_folder(tmp_path: Path) -> None:
    assert pip.asked_at("") == []
    assert pip.asked_at("https://index/whl/cu126") == ["--extra-index-url", "https://index/whl/cu126"]
    assert pip.asked_at(str(tmp_path)) == ["--find-links", str(tmp_path)]


def test_the_wheelhouse_script_asks_the_index_that_setup_asks() -> None:
    defaults = (ROLE / "defaults" / "main.yml").read_text()
    assert f"'{load(ROOT / 'scripts' / 'wheelhouse.py').CPU_INDEX}'" in defaults


@pytest.fixture
def host(tmp_path: Path) -> dict[str, Any]:
    """Parameters of an environment on a host whose wheelhouse holds two small wheels and the real uv."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert uv, "uv comes with the controller's packages: make venv"
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    make_wheel(wheels, "alpha", "1.0", body="x = 1\n")
    make_wheel(wheels, "beta", "2.0")
    locks.write_lock(wheels / locks.REQUIREMENTS, [locks.wheel_of(path) for path in wheels.glob("*.whl")])
    tool = wheels / "uv-0.1-py3-none-any.whl"
    with zipfile.ZipFile(tool, "w") as archive:
        archive.write(uv, "uv-0.1.data/scripts/uv")
    locks.write_lock(wheels / locks.TOOLS, [locks.wheel_of(tool)])
    return {
        "wheelhouse": str(wheels),
        "digest": locks.sha256_of(wheels / locks.REQUIREMENTS),
        "python": sys.executable,
        "venvs": str(tmp_path / "venvs"),
        "link": str(tmp_path / "venv"),
        "imports": ["alpha"],
    }


def test_environment_is_made_once_and_mended_when_changed(host: dict[str, Any]) -> None:
    assert locked_venv.run(host, True)["changed"]
    assert not Path(host["venvs"]).exists()
    first = locked_venv.run(host, False)
    assert first["changed"]
    assert first["versions"] == {"alpha": "1.0", "beta": "2.0"}
    again = locked_venv.run(host, False)
    assert (again["changed"], again["installed"]) == (False, first["installed"])

    shutil.rmtree(next(Path(host["link"]).glob("lib/python*/site-packages/beta-*.dist-info")))
    mended = locked_venv.run(host, False)
    assert (mended["changed"], mended["installed"]) == (True, first["installed"])

    (Path(host["link"]) / locked_venv.MARKER).unlink()  # as if it had been interrupted
    assert locked_venv.run(host, False)["changed"]


def test_upgrade_switches_the_link_and_takes_the_old_one_away(host: dict[str, Any]) -> None:
    old = locked_venv.run(host, False)
    wheels = Path(host["wheelhouse"])
    next(wheels.glob("beta-*")).unlink()
    make_wheel(wheels, "beta", "2.1")
    found = [locks.wheel_of(path) for path in wheels.glob("*.whl") if not path.name.startswith("uv-")]
    locks.write_lock(wheels / locks.REQUIREMENTS, found)
    new = locked_venv.run({**host, "digest": locks.sha256_of(wheels / locks.REQUIREMENTS)}, False)
    assert new["removed"] == [old["path"]]
    assert Path(host["link"]).resolve() == Path(new["path"]).resolve()
    assert "beta==2.1" in new["diff"]["after"]
    assert "beta==2.0" in new["diff"]["before"]


def test_a_wheel_that_is_not_the_locked_one_is_refused_by_name(host: dict[str, Any]) -> None:
    make_wheel(Path(host["wheelhouse"]), "beta", "2.0", body="import os\n")
    with pytest.raises(locked_venv.VenvError, match=r"beta-2\.0-py3-none-any\.whl"):
        locked_venv.run(host, False)
    assert not Path(host["link"]).exists()


def test_another_lock_than_the_controllers_is_refused(host: dict[str, Any]) -> None:
    with pytest.raises(locked_venv.VenvError, match="not the one the controller made"):
        locked_venv.run({**host, "digest": "0" * 64}, False)


def test_a_module_that_does_not_work_is_a_sentence(host: dict[str, Any]) -> None:
    with pytest.raises(
        locked_venv.VenvError, match=r"gamma does not work on this host: .*No module named 'gamma'"
    ):
        locked_venv.run({**host, "imports": ["gamma"]}, False)
    assert not Path(host["link"]).exists()


@pytest.mark.parametrize("empty", [False, True])
def test_a_file_that_was_cut_off_is_named_and_mended(host: dict[str, Any], empty: bool) -> None:
    """A power cut leaves files without their bytes; the recorded digests alone would not see it."""
    first = locked_venv.run(host, False)
    assert locked_venv.run(host, True)["flaws"] == []
    module = next(Path(host["link"]).glob("lib/python*/site-packages/alpha.py"))
    module.unlink()
    if empty:
        module.touch()
    seen = locked_venv.run(host, True)
    assert (seen["ready"], seen["flaws"]) == (False, [f"{module.resolve()} is gone or cut off"])
    assert locked_venv.run(host, False)["installed"] == first["installed"]
    assert module.read_text() == "x = 1\n"


def hostvars(**hosts: tuple[str, str, dict[str, str]]) -> dict[str, Any]:
    """By host: Python, and torch's build and index behind slashes; digest of what is installed; versions."""
    found = {}
    for name, (kind, installed, versions) in hosts.items():
        python, torch, index = [*kind.split("/", 2), "", ""][:3]
        seen = {"python": python, "machine": "x86_64", "torch": torch or "cpu", "index": index}
        found[name] = {
            "__runtime_probe": {"stdout": json.dumps(seen)},
            "__runtime_asked": {
                "ready": True,
                "installed": installed,
                "versions": versions,
                "project": "p" * 64,
            },
        }
    return found


def test_the_odd_host_is_named() -> None:
    torch = {"torch": "2.0+cpu"}
    same = hostvars(
        a=("3.11", "x" * 64, torch), b=("3.11", "x" * 64, torch), c=("3.12", "z" * 64, {"torch": "2.0"})
    )
    assert filters.runtime_findings(["a", "b", "c"], same) == []
    assert [kind["name"] for kind in filters.runtime_kinds(["a", "b", "c"], same)] == [
        "3.11-x86_64",
        "3.12-x86_64",
    ]
    odd = {**same, **hostvars(d=("3.11", "y" * 64, {"torch": "1.9"}))}
    odd["d"]["__runtime_asked"]["project"] = "q" * 64
    found = filters.runtime_findings(["a", "b", "c", "d"], odd)
    assert [sentence.split(":")[0].split()[0] for sentence in found] == ["d", "d", "d"]
    assert "torch 1.9, the others 2.0" in found[1]
    assert "the trainer qqqqqqqqqqqq, the others pppppppppppp" in found[2]


def test_a_fleet_of_cpu_and_cuda_hosts_has_equal_versions_and_its_own_kinds() -> None:
    index = "https://download.pytorch.org/whl/cu126/"
    mixed = hostvars(
        a=("3.11", "x" * 64, {"torch": "2.13.0+cpu", "numpy": "2"}),
        b=("3.11/cuda", "y" * 64, {"torch": "2.13.0", "numpy": "2", "triton": "3"}),
        c=(f"3.11/cuda/{index}", "z" * 64, {"torch": "2.13.0+cu126", "numpy": "2", "triton": "3"}),
    )
    assert filters.runtime_findings(["a", "b", "c"], mixed) == []
    kinds = filters.runtime_kinds(["a", "b", "c"], mixed)
    assert [(kind["name"], kind["torch"], kind["index"]) for kind in kinds] == [
        ("3.11-x86_64", "cpu", ""),
        ("3.11-x86_64-cu126", "cuda", index),
        ("3.11-x86_64-cuda", "cuda", ""),
    ]
    said = filters.runtime_summary(["a", "b", "c"], mixed)
    assert "torch 2.13.0, the trainer pppppppppppp" in said
    assert "3.11-x86_64-cu126 zzzzzzzzzzzz on c" in said


def test_a_dry_run_before_the_first_setup_has_nothing_to_compare() -> None:
    bare = hostvars(a=("3.11", "", {}))
    bare["a"]["__runtime_asked"] = {"ready": False, "installed": "", "versions": {}, "project": ""}
    assert filters.runtime_findings(["a"], bare) == []
    assert filters.runtime_summary(["a"], bare) == "No environment is installed yet."
