"""Manual pages are rendered by mandoc or skipped; everything else stays as it is."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.data import manual_pages
from trainer.data.manual_pages import find_mandoc, is_manual
from trainer.data.sources import MANUAL, UNREADABLE, SkippedFileError, documents, find_files

MAN = '.\\" a comment\n.TH COPY 1 "July 2024"\n.SH NAME\ncopy\n'
MDOC = ".Dd July 1, 2024\n.Dt X 1\n.Sh NAME\n"
# Prints its first line in bold as mandoc does, and how many bytes it was given.
STAND_IN = r"""#!/bin/sh
[ "$*" = "-T utf8 -I os=" ] || exit 5
printf 'N\bNA\bAM\bME\bE\n'
wc -c | tr -d ' '
"""


@pytest.fixture(autouse=True)
def forget_mandoc() -> Iterator[None]:
    find_mandoc.cache_clear()
    yield
    find_mandoc.cache_clear()


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def read(root: Path) -> dict[str, str]:
    """The text of each file, or why it is skipped."""
    texts = {}
    for file in find_files([root])[0]:
        name = file.path.relative_to(root).as_posix()
        try:
            texts[name] = "".join(documents(file, 10**6))
        except SkippedFileError as reason:
            texts[name] = str(reason)
    return texts


def put_on_path(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "mandoc").write_text(script)
    (folder / "mandoc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_pages_in_their_folders_are_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path / "bin", STAND_IN, monkeypatch)
    pages = {"man1/copy.1.gz": MAN, "de/man8/copy.8": MAN, "man1/bsd.1": MDOC}
    others = {"text/copy.1": MAN, "man1/notes.txt": MAN, "man1/empty.1": "no macro\n"}
    for name, text in {**pages, **others}.items():
        write(tmp_path / "source", name, text)
    rendered = {name: f"NAME\n{len(text)}\n" for name, text in pages.items()}
    assert read(tmp_path / "source") == {**rendered, **others}


def test_without_mandoc_they_are_skipped_and_the_reason_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    write(tmp_path / "source", "man1/copy.1", MAN)
    write(tmp_path / "source", "notes.txt", "notes\n")
    assert read(tmp_path / "source") == {"man1/copy.1": MANUAL, "notes.txt": "notes\n"}
    assert "mandoc" in MANUAL


@pytest.mark.parametrize("script", ["exit 2", "exec sleep 9"])
def test_a_page_that_mandoc_does_not_render_is_skipped(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path / "bin", f"#!/bin/sh\n{script}\n", monkeypatch)
    monkeypatch.setattr(manual_pages, "RENDER_SECONDS", 0.5)
    write(tmp_path / "source", "man1/copy.1", MAN)
    assert read(tmp_path / "source") == {"man1/copy.1": UNREADABLE}


def test_an_empty_file_is_no_manual_page() -> None:
    assert not is_manual(Path("/x/man1/empty.1"), "")
