"""The wheelhouse, without an index: which wheels a host needs, and what is wrong with one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_lock as locks
from ansible_collections.nanofleet.fleet.plugins.module_utils import wheel_pip as pip
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of
from ansible_collections.nanofleet.fleet.plugins.modules import wheelhouse
from wheels import ROLE, ROOT, names

from scripts.lock import CPU_INDEX


def test_packages_follow_the_hosts_markers_and_the_extra(house: dict[str, Any]) -> None:
    assert wheelhouse.run(house, False)["changed"]
    assert names(house["dest"]) == ["alpha", "beta", "nanofleet", "old", "speed", "uv"]
    newer = {**house, "python_version": "3.12", "dest": house["dest"].replace("3.11", "3.12")}
    wheelhouse.run(newer, False)
    assert "old" not in names(newer["dest"])


def test_lock_has_every_wheel(house: dict[str, Any]) -> None:
    wheelhouse.run(house, False)
    lock = locks.read_lock(Path(house["dest"]) / locks.REQUIREMENTS)
    assert [wheel.name for wheel in lock] == ["alpha", "beta", "nanofleet", "old", "speed", "uv"]


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
    with pytest.raises(ValueError, match=rf"beta-2\.0.*{phrase}"):
        wheelhouse.run(house, False)
    path.unlink()
    assert wheelhouse.run(house, False)["changed"]
    assert locks.faults(Path(house["dest"]), locks.read_lock(Path(house["dest"]) / locks.REQUIREMENTS)) == []


def test_a_failure_leaves_no_half_wheelhouse(house: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = wheelhouse.run(house, False)
    (Path(house["source"]) / "trainer" / "a.py").write_text("x = 3\n")

    def broken(self: Any, folder: Path) -> None:
        raise ValueError("no")

    monkeypatch.setattr(wheelhouse.Wheelhouse, "_build", broken)
    with pytest.raises(ValueError, match=r"^no$"):
        wheelhouse.run(house, False)
    dest = Path(house["dest"])
    assert sha256_of(dest / locks.REQUIREMENTS) == first["digest"]
    assert [path.name for path in dest.parent.iterdir() if path.is_dir()] == ["train"]


def test_a_requirement_that_is_not_locked_is_reported(house: dict[str, Any]) -> None:
    path = Path(house["source"]) / "pyproject.toml"
    path.write_text(path.read_text().replace('"alpha"', '"alpha", "gamma>=3"'))
    with pytest.raises(ValueError, match=r"needs gamma>=3, but .* does not have it.*make lock"):
        wheelhouse.run(house, False)


def test_an_unknown_extra_names_those_there_are(house: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no extra 'nope'; it has: train"):
        wheelhouse.run({**house, "extra": "nope"}, False)


def test_without_a_network_every_missing_wheel_is_named_with_how_to_make_it(house: dict[str, Any]) -> None:
    offline = {**house, "offline": True}
    with pytest.raises(ValueError, match="lacks alpha") as refused:
        wheelhouse.run(offline, False)
    assert "lacks alpha==1.0, beta==2.0, old==0.1, speed==3.0, uv==0.1, and" in str(refused.value)
    assert (
        "wheelhouse.yml -e wheelhouse_python=3.11 -e wheelhouse_machine=x86_64 -e runtime_torch=cpu  Then"
        in str(refused.value)
    )
    assert house["asked"] == []

    wheelhouse.run(house, False)
    elsewhere = Path(house["dest"])
    brought = elsewhere.parents[1] / "brought" / "train"
    shutil.copytree(elsewhere, brought)
    assert not wheelhouse.run({**offline, "dest": str(brought)}, False)["changed"]
    # Sources that have changed need no index; a wheel that was lost on the way is named.
    (Path(house["source"]) / "trainer" / "a.py").write_text("x = 4\n")
    next(brought.glob("speed-*")).unlink()
    with pytest.raises(ValueError, match=r"lacks speed==3\.0, and"):
        wheelhouse.run({**offline, "dest": str(brought)}, False)


def test_a_pin_that_does_not_meet_a_requirement_is_a_sentence(house: dict[str, Any]) -> None:
    path = Path(house["constraints"])
    path.write_text(path.read_text().replace("beta==2.0", "beta==0.5"))
    with pytest.raises(ValueError, match=r"needs beta>=1, but it is pinned to 0\.5"):
        wheelhouse.run(house, False)


def test_an_index_is_a_url_or_a_folder(tmp_path: Path) -> None:
    assert pip.asked_at("") == []
    assert pip.asked_at("https://index/whl/cu126") == ["--extra-index-url https://index/whl/cu126"]
    assert pip.asked_at(str(tmp_path)) == [f"--find-links {tmp_path}"]


@pytest.mark.parametrize("path", [ROLE / "defaults" / "main.yml", ROOT / "playbooks" / "wheelhouse.yml"])
def test_setup_and_the_wheelhouse_playbook_ask_the_index_of_make_lock(path: Path) -> None:
    assert f"'{CPU_INDEX}'" in path.read_text()
