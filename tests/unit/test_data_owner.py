"""Whose a data directory is: links are not followed, and root's rights are given up before files are read."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import data_folder as module
from ansible_collections.nanofleet.fleet.plugins.module_utils import service_user

ROLE = Path(__file__).resolve().parents[2] / "roles" / "dataset"

ME, OTHER = pwd.getpwuid(os.getuid()).pw_name, "nobody"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    for folder in ("shards", "tokenizer", "rows"):
        (path / folder).mkdir(parents=True)
    for name in ("manifest.json", "shards/a.parquet", "tokenizer/tokenizer.json", "rows/kept"):
        (path / name).write_text("x")
    path.chmod(0o755)
    return path


def own(path: Path, user: str = ME, reader: str = ME, check: bool = False) -> dict[str, object]:
    return dict(module.own(path, user, reader, 0o750, check))


def whose(path: Path) -> str:
    return pwd.getpwuid(path.lstat().st_uid).pw_name


def test_a_folder_is_made_once_and_read_by_user_and_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    assert own(path, check=True)["changed"]
    assert not path.exists()
    assert own(path)["changed"]
    assert path.stat().st_mode & 0o777 == 0o750
    assert not own(path)["changed"]


def test_a_dry_run_before_the_user_is_made_changes_nothing(tmp_path: Path) -> None:
    assert module.own(tmp_path / "data", "no-such-user", ME, 0o750, True)["changed"]
    with pytest.raises(ValueError, match=r"no-such-user.*ansible-playbook setup\.yml"):
        module.own(tmp_path / "data", "no-such-user", ME, 0o750, False)


@as_root
def test_what_is_pushed_changes_its_owner_and_rows_do_not(data: Path) -> None:
    assert own(data, OTHER, check=True)["changed"]
    assert whose(data) == ME
    assert own(data, OTHER)["given"] == 6
    assert {whose(data / name) for name in ("", "manifest.json", "shards", "shards/a.parquet")} == {OTHER}
    assert whose(data / "rows") == whose(data / "rows" / "kept") == ME
    assert data.stat().st_gid == os.getgid(), "the reader keeps its access meanwhile"


@as_root
def test_links_that_the_service_user_planted_are_not_followed(data: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    (data / "shards" / "b.parquet").symlink_to(precious / "inner")
    (data / "shards" / "c").symlink_to(precious)
    own(data, OTHER)
    assert whose(precious) == whose(precious / "inner") == ME
    aside = data.rename(tmp_path / "aside")
    data.symlink_to(precious)
    with pytest.raises(ValueError, match=rf"{data} is a link or not a folder\. Remove it"):
        own(data, OTHER)
    assert whose(precious) == ME
    os.link(precious.parent / "aside" / "manifest.json", aside / "shards" / "hard")
    with pytest.raises(ValueError, match="is a hard link of another file"):
        own(aside, ME)


@as_root
def test_data_are_read_as_their_owner_and_not_as_root(data: Path) -> None:
    """Else a link to a file that only root reads would be read, and remembered, for whoever planted it."""
    (data / "secret").touch(mode=0o600)
    (data / "link").symlink_to(data / "secret")
    with service_user.acting_as(OTHER):
        assert (os.geteuid(), os.getegid()) == pwd.getpwnam(OTHER)[2:4]
        with pytest.raises(PermissionError):
            (data / "link").read_bytes()
    with service_user.acting_as("no-such-user"):
        assert os.geteuid() == 0
    assert (os.geteuid(), os.getegid()) == (0, os.getgid())
