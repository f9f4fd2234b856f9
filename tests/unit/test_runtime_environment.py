"""The locked environment on a host, and hosts that differ in theirs."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import runtime_environments as filters
from ansible_collections.nanofleet.fleet.plugins.module_utils import venv_state
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_lock as locks
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of
from ansible_collections.nanofleet.fleet.plugins.modules import locked_venv
from wheels import make_wheel


def sent(wheels: Path) -> dict[str, Any]:
    """What the controller sends as arguments: its locks, and the digest that names the environment."""
    return {
        "digest": sha256_of(wheels / locks.REQUIREMENTS),
        "requirements": (wheels / locks.REQUIREMENTS).read_text(),
    }


@pytest.fixture
def host(tmp_path: Path) -> dict[str, Any]:
    """Parameters of an environment on a host whose wheelhouse holds two small wheels and the real uv."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert uv, "uv comes with the controller's packages: make venv"
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    make_wheel(wheels, "alpha", "1.0", body="x = 1\n")
    make_wheel(wheels, "beta", "2.0")
    with zipfile.ZipFile(wheels / "uv-0.1-py3-none-any.whl", "w") as archive:
        archive.write(uv, "uv-0.1.data/scripts/uv")
    locks.write_lock(wheels / locks.REQUIREMENTS, [locks.wheel_of(path) for path in wheels.glob("*.whl")])
    return {
        "wheelhouse": str(wheels),
        **sent(wheels),
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
    fixed = locked_venv.run(host, False)
    assert (fixed["changed"], fixed["installed"]) == (True, first["installed"])

    (Path(host["link"]) / venv_state.MARKER).unlink()  # as if it had been interrupted
    assert locked_venv.run(host, False)["changed"]


def test_upgrade_switches_the_link_and_takes_the_old_one_away(host: dict[str, Any]) -> None:
    old = locked_venv.run(host, False)
    wheels = Path(host["wheelhouse"])
    next(wheels.glob("beta-*")).unlink()
    make_wheel(wheels, "beta", "2.1")
    found = [locks.wheel_of(path) for path in wheels.glob("*.whl")]
    locks.write_lock(wheels / locks.REQUIREMENTS, found)
    new = locked_venv.run({**host, **sent(wheels)}, False)
    assert new["removed"] == [old["path"]]
    assert Path(host["link"]).resolve() == Path(new["path"]).resolve()
    assert "beta==2.1" in new["diff"]["after"]
    assert "beta==2.0" in new["diff"]["before"]


def test_a_wheel_that_is_not_the_locked_one_is_refused_by_name(host: dict[str, Any]) -> None:
    make_wheel(Path(host["wheelhouse"]), "beta", "2.0", body="import os\n")
    with pytest.raises(ValueError, match=r"beta-2\.0-py3-none-any\.whl"):
        locked_venv.run(host, False)
    assert not Path(host["link"]).exists()


def test_a_program_and_a_lock_that_the_login_user_exchanged_are_not_run(
    host: dict[str, Any], tmp_path: Path
) -> None:
    """The staged folder is the login user's: uv in it, with a lock that fits, would else run as root."""
    wheels, ran = Path(host["wheelhouse"]), tmp_path / "ran"
    tool = wheels / "uv-0.1-py3-none-any.whl"
    with zipfile.ZipFile(tool, "w") as archive:
        archive.writestr("uv-0.1.data/scripts/uv", f"#!/bin/sh\ntouch {ran}\n")
    locks.write_lock(wheels / locks.REQUIREMENTS, [locks.wheel_of(path) for path in wheels.glob("*.whl")])
    with pytest.raises(ValueError, match=r"uv-0\.1-py3-none-any\.whl (has|was altered)"):
        locked_venv.run(host, False)
    assert not ran.exists()


def test_what_is_run_and_installed_are_copies_that_were_checked(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that is replaced after the check, while uv works, is not the one that uv reads."""
    run, commands = locked_venv.command, []

    def replace_first(arguments: list[str], *rest: Any, **settings: str) -> None:
        commands.append(arguments)
        for wheel in Path(host["wheelhouse"]).glob("*.whl"):
            wheel.write_bytes(b"replaced")
        run(arguments, *rest, **settings)

    monkeypatch.setattr(locked_venv, "command", replace_first)
    assert locked_venv.run(host, False)["versions"] == {"alpha": "1.0", "beta": "2.0"}
    assert len(commands) == 4
    assert not [each for each in commands if any(host["wheelhouse"] in argument for argument in each)]
    assert not list(Path(host["venvs"]).glob(".*")), "the copies are removed"


@pytest.mark.parametrize("crashes", [1, 2])
def test_an_installation_that_crashes_is_repeated_once(
    host: dict[str, Any], monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    run, left = locked_venv.command, [*range(crashes)]

    def crash_first(arguments: list[str], *rest: Any, **settings: str) -> None:
        run(arguments, *rest, **settings)
        if "install" in arguments and left:
            left.pop()
            run(["sh", "-c", "kill -SEGV $$"], *rest)

    monkeypatch.setattr(locked_venv, "command", crash_first)
    if crashes == 1:
        assert locked_venv.run(host, False)["versions"] == {"alpha": "1.0", "beta": "2.0"}
    else:
        with pytest.raises(ValueError, match=r"the wheelhouse: .* ended by SIGSEGV\. Run the playbook again"):
            locked_venv.run(host, False)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_staged_link_or_pipe_is_not_read(host: dict[str, Any], kind: str, tmp_path: Path) -> None:
    wheel = next(Path(host["wheelhouse"]).glob("beta-*"))
    aside = wheel.rename(tmp_path / wheel.name)
    wheel.symlink_to(aside) if kind == "link" else os.mkfifo(wheel)
    with pytest.raises(ValueError, match=r"beta-2\.0-py3-none-any\.whl is missing"):
        locked_venv.run(host, False)


def test_modules_are_tried_from_the_environment_and_not_from_where_root_was_started(
    host: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo keeps the login user's home as the working directory."""
    home, ran = tmp_path / "home", tmp_path / "ran"
    home.mkdir()
    (home / "alpha.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.chdir(home)
    locked_venv.run(host, False)
    assert not ran.exists()


def test_another_lock_than_the_controllers_is_refused(host: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the one the controller made"):
        locked_venv.run({**host, "digest": "0" * 64}, False)


def test_a_module_that_does_not_work_is_a_sentence(host: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gamma does not work on this host: .*No module named 'gamma'"):
        locked_venv.run({**host, "imports": ["gamma"]}, False)
    assert not Path(host["link"]).exists()


@pytest.mark.parametrize("empty", [False, True])
def test_a_file_that_was_cut_off_is_named_and_mended(host: dict[str, Any], empty: bool) -> None:
    """A power cut leaves files without their bytes; the recorded digests alone would not see it."""
    first = locked_venv.run(host, False)
    assert locked_venv.run(host, True)["problems"] == []
    module = next(Path(host["link"]).glob("lib/python*/site-packages/alpha.py"))
    module.unlink()
    if empty:
        module.touch()
    seen = locked_venv.run(host, True)
    assert (seen["ready"], seen["problems"]) == (False, [f"{module.resolve()} is missing or cut off"])
    assert locked_venv.run(host, False)["installed"] == first["installed"]
    assert module.read_text() == "x = 1\n"


def hostvars(**hosts: tuple[str, str, dict[str, str]]) -> dict[str, Any]:
    """By host: Python, and torch's build and index behind slashes; digest of what is installed; versions."""
    found = {}
    for name, (kind, installed, versions) in hosts.items():
        python, torch, index = [*kind.split("/", 2), "", ""][:3]
        seen = {"python": python, "machine": "x86_64"}
        found[name] = {
            "runtime_kind": filters.runtime_kind(seen, torch or "cpu", index),
            "runtime_checked": {
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
    assert not list(filters.runtime_findings(["a", "b", "c"], same))
    assert [host["runtime_kind"]["name"] for host in same.values()] == [
        "3.11-x86_64",
        "3.11-x86_64",
        "3.12-x86_64",
    ]
    odd = {**same, **hostvars(d=("3.11", "y" * 64, {"torch": "1.9"}))}
    odd["d"]["runtime_checked"]["project"] = "q" * 64
    found = list(filters.runtime_findings(["a", "b", "c", "d"], odd))
    assert [(each["host"], each["code"]) for each in found] == [
        ("d", "NF301"),
        ("d", "NF302"),
        ("d", "NF303"),
    ]
    assert found[0]["remedy"].startswith("sudo rm -r $(readlink -f /opt/nanofleet/venv)  (on d)")
    assert "torch 1.9, and other hosts have 2.0" in found[1]["problem"]
    assert "(digest qqqqqqqqqqqq) differs from that on other hosts (digest pppp" in found[2]["problem"]
    odd["d"] |= {"ansible_become": False, "nanofleet_prefix": "/home/me/.local/share/nanofleet"}
    [own, *_] = filters.runtime_findings(["a", "b", "c", "d"], odd)
    assert own["remedy"].startswith("rm -r $(readlink -f /home/me/.local/share/nanofleet/venv)  (on d)")


def test_a_fleet_of_cpu_and_cuda_hosts_has_equal_versions_and_its_own_kinds() -> None:
    index = "https://download.pytorch.org/whl/cu126/"
    mixed = hostvars(
        a=("3.11", "x" * 64, {"torch": "2.13.0+cpu", "numpy": "2"}),
        b=("3.11/cuda", "y" * 64, {"torch": "2.13.0", "numpy": "2", "triton": "3"}),
        c=(f"3.11/cuda/{index}", "z" * 64, {"torch": "2.13.0+cu126", "numpy": "2", "triton": "3"}),
    )
    assert not list(filters.runtime_findings(["a", "b", "c"], mixed))
    kinds = [host["runtime_kind"] for host in mixed.values()]
    assert [(kind["name"], kind["torch"]) for kind in kinds] == [
        ("3.11-x86_64", "cpu"),
        ("3.11-x86_64-cuda", "cuda"),
        ("3.11-x86_64-cu126", "cuda"),
    ]
    printed = filters.runtime_summary(["a", "b", "c"], mixed)
    assert "torch 2.13.0, the trainer pppppppppppp" in printed
    assert "3.11-x86_64-cu126 zzzzzzzzzzzz on c" in printed


def test_a_dry_run_before_the_first_setup_has_nothing_to_compare() -> None:
    bare = hostvars(a=("3.11", "", {}))
    bare["a"]["runtime_checked"] = {"ready": False, "installed": "", "versions": {}, "project": ""}
    assert not list(filters.runtime_findings(["a"], bare))
    assert filters.runtime_summary(["a"], bare) == "No environment is installed yet."


def test_a_package_that_lacks_another_is_reported(host: dict[str, Any]) -> None:
    """As with pins of one's own, under which a package may need more than the committed resolution has."""
    wheels = Path(host["wheelhouse"])
    make_wheel(wheels, "beta", "2.0", requires=("gamma>=3",))
    locks.write_lock(wheels / locks.REQUIREMENTS, [locks.wheel_of(path) for path in wheels.glob("*.whl")])
    with pytest.raises(ValueError, match=r"do not fit together: .*beta.*gamma>=3"):
        locked_venv.run({**host, **sent(wheels)}, False)
    assert not Path(host["link"]).exists()
