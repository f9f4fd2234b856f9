"""A CORE bundle is downloaded, verified and unpacked; a zip file that leads elsewhere is refused."""

from __future__ import annotations

import hashlib
import io
import stat
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_bundles import FIXTURE
from shard_server import Handler, Server, Site

from trainer.data import DataError, transfer
from trainer.eval.core_bundle import read_bundle
from trainer.eval.core_download import PUBLIC, fetch_bundle


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.001)
    site = Site(files={})
    handler = type("Bound", (Handler,), {"site": site})
    server = Server(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield site
    server.shutdown()
    server.server_close()


def zipped(members: dict[str, bytes | str], mode: int = 0) -> bytes:
    """A zip file; `mode` of its members if it is not 0."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return file.getvalue()


def bundle(prefix: str = "eval_bundle/") -> dict[str, bytes | str]:
    files = [path for path in sorted(FIXTURE.rglob("*")) if path.is_file()]
    return {prefix + path.relative_to(FIXTURE).as_posix(): path.read_bytes() for path in files}


def serve(site: Site, data: bytes) -> tuple[str, str]:
    """URL and sha256 of the data."""
    site.files["/bundle.zip"] = data
    return f"{site.url}/bundle.zip", hashlib.sha256(data).hexdigest()


def refusal(url: str, sha256: str, folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        fetch_bundle(url, sha256, folder)
    assert not folder.exists()
    assert {path.name for path in folder.parent.iterdir()} <= {".core.lock", ".core.zip"}
    return str(refused.value)


@pytest.mark.parametrize("prefix", ["", "eval_bundle/", "some/where/"])
def test_a_bundle_is_downloaded_once(prefix: str, site: Site, tmp_path: Path) -> None:
    extra = {"__MACOSX/._core.yaml": "x", prefix + ".DS_Store": "x", "other.txt": "x"}
    url, sha256 = serve(site, zipped(bundle(prefix) | extra))
    for _ in range(2):
        fetch_bundle(url, sha256, tmp_path / "core")
    assert len(site.asked) == 1
    assert read_bundle(tmp_path / "core").digest == read_bundle(FIXTURE).digest
    assert not (tmp_path / "core" / ".DS_Store").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"core", ".core.lock"}


def test_a_bundle_can_be_named(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(url.startswith("https://") for url in PUBLIC.values())
    url, sha256 = serve(site, zipped(bundle()))
    monkeypatch.setitem(PUBLIC, "nanochat", url)
    fetch_bundle("nanochat", sha256, tmp_path / "core")
    assert read_bundle(tmp_path / "core").tasks
    with pytest.raises(DataError) as refused:
        fetch_bundle("nanochta", "", tmp_path / "core")
    assert "http:// or https://, or nanochat." in str(refused.value)


def test_a_broken_connection_continues(site: Site, tmp_path: Path) -> None:
    site.send_at_most = 500
    url, sha256 = serve(site, zipped(bundle()))
    fetch_bundle(url, sha256, tmp_path / "core")
    assert len(site.asked) > 1
    assert read_bundle(tmp_path / "core").tasks


def test_a_file_with_another_sha256_is_removed(site: Site, tmp_path: Path) -> None:
    url, sha256 = serve(site, zipped(bundle()))
    printed = refusal(url, "0" * 64, tmp_path / "core")
    assert f"has the sha256 {sha256} instead of {'0' * 64}" in printed
    assert not (tmp_path / ".core.zip").exists()
    fetch_bundle(url, sha256, tmp_path / "core")


def test_without_a_sha256_the_one_found_is_printed(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, sha256 = serve(site, zipped(bundle()))
    fetch_bundle(url, "", tmp_path / "core")
    assert f"it is {sha256} now, for --core-sha256" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["../core.yaml", "/tmp/core.yaml", "a/../../b", "a\\..\\b", "c:/b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, site: Site, tmp_path: Path) -> None:
    url, sha256 = serve(site, zipped({"core.yaml": "", name: "x"}))
    assert "is not allowed in a CORE bundle" in refusal(url, sha256, tmp_path / "core")


def test_a_link_is_refused(site: Site, tmp_path: Path) -> None:
    url, sha256 = serve(site, zipped({"core.yaml": "/etc/passwd"}, stat.S_IFLNK | 0o777))
    assert "is not allowed in a CORE bundle" in refusal(url, sha256, tmp_path / "core")


@pytest.mark.parametrize(
    ("data", "printed"),
    [
        (b"no zip file", "cannot be unpacked"),
        (zipped({"readme.txt": "x"}), "is no CORE bundle: it has no core.yaml"),
        (zipped(bundle())[:-40], "cannot be unpacked"),
    ],
)
def test_a_file_that_is_no_bundle_is_refused(data: bytes, printed: str, site: Site, tmp_path: Path) -> None:
    url, sha256 = serve(site, data)
    assert printed in refusal(url, sha256, tmp_path / "core")


def test_a_folder_with_other_files_is_left_alone(site: Site, tmp_path: Path) -> None:
    url, sha256 = serve(site, zipped(bundle()))
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "mine.txt").write_text("x")
    with pytest.raises(DataError, match=r"has files and no core\.yaml"):
        fetch_bundle(url, sha256, tmp_path / "core")
    assert [path.name for path in (tmp_path / "core").iterdir()] == ["mine.txt"]


def test_an_address_without_the_file_is_named(site: Site, tmp_path: Path) -> None:
    printed = refusal(f"{site.url}/none.zip", "", tmp_path / "core")
    assert "the server answers 404" in printed
    assert printed.endswith("Check --core-url.")
