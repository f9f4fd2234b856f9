"""Downloads a CORE bundle, a zip file at a URL, and unpacks it: `fetch_bundle(url, sha256, folder)`.

If its sha256 is known, the zip file is verified before it is opened. The paths in it are checked, so that
nothing is written outside of the folder. The folder appears only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from trainer.data import DataError
from trainer.data.files import file_sha256, locked, sync_folder
from trainer.data.progress import Progress
from trainer.data.transfer import SharedState, Transfer
from trainer.eval.core_bundle import TASKS

MOST_BYTES = 8 * 2**30  # of all files, unpacked: nanochat's bundle has less than 1 GB
MOST_FILES = 10_000
ADVICE = "Check --core-url."
PUBLIC = {"nanochat": "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"}
"""Public CORE bundles: {name for --core-url: URL of the zip file}."""


def fetch_bundle(url: str, sha256: str, folder: Path) -> None:
    """Download a zip file and unpack its CORE bundle to `folder`, unless the folder has a bundle already.

    url: address of the zip file, or a name in PUBLIC. sha256: sha256 of the zip file, 64 hex digits; "" if it
    is not known. Several processes of one host may call this function at once: one process downloads, the
    others wait. Raises DataError if the file cannot be downloaded, has another sha256 or is no CORE bundle,
    or if the folder has other files.
    """
    url = PUBLIC.get(url, url)
    if not url.startswith(("http://", "https://")):
        raise DataError(
            f"--core-url is {url}: it takes a URL that begins with http:// or https://, or "
            f"{' or '.join(PUBLIC)}."
        )
    folder = folder.absolute()
    with locked(folder.with_name(f".{folder.name}.lock")):
        if (folder / TASKS).exists():
            return
        if folder.exists() and any(folder.iterdir()):
            raise DataError(f"{folder} has files and no {TASKS}. Give an empty or new folder with --core.")
        archive = folder.with_name(f".{folder.name}.zip")
        _download(url, sha256, archive)
        _unpack(archive, folder)
        archive.unlink()


def _download(url: str, sha256: str, archive: Path) -> None:
    """Download the zip file and verify its sha256. Raises DataError."""
    with Progress("downloading the CORE bundle") as progress:
        transfer = Transfer(url, archive, SharedState(progress), ADVICE)
        expected = transfer.run().sha256
        found = file_sha256(archive)
        expected = sha256 or expected
        if expected and found != expected:
            transfer.discard()
            raise DataError(
                f"The download of {url} has the sha256 {found} instead of {expected}, and was deleted. Check "
                "--core-url and, if you gave it, --core-sha256."
            )
        transfer.metadata_path.unlink(missing_ok=True)
        if not expected:
            progress.note(f"no sha256 of {url} is known; it is {found} now, for --core-sha256")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the bundle in the zip file `archive` to `folder`.

    The bundle may be in a subfolder of the zip file. Raises DataError if it cannot be unpacked.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with zipfile.ZipFile(archive) as file:
            members = {info: _checked(info) for info in file.infolist() if not _is_extra(info)}
            sizes = sum(info.file_size for info in members)
            if sizes > MOST_BYTES or len(members) > MOST_FILES:
                raise DataError(
                    f"{archive} is too large for a CORE bundle: it has {len(members):,} files and "
                    f"{sizes:,} bytes, and at most {MOST_FILES:,} files and {MOST_BYTES:,} bytes are "
                    f"allowed. {ADVICE}"
                )
            roots = [path.parent for path in members.values() if path.name == TASKS]
            if not roots:
                raise DataError(f"{archive} is no CORE bundle: it has no {TASKS}.")
            root = min(roots, key=lambda path: len(path.parts))
            for info, path in members.items():
                if path.is_relative_to(root):
                    target = temporary / path.relative_to(root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with file.open(info) as packed, open(target, "xb") as unpacked:
                        shutil.copyfileobj(packed, unpacked)
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    # A damaged file, damaged compressed data, a file that is cut off; one that is encrypted or compressed by
    # an unknown method.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(
            f"{archive} cannot be unpacked ({error}). Repeat the command, which downloads the file again. If "
            f"this message appears again, the file cannot be used. {ADVICE}"
        ) from None
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked to {folder}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_extra(info: zipfile.ZipInfo) -> bool:
    """Whether a member is a folder, or a file that macOS adds."""
    parts = PurePosixPath(info.filename).parts
    return info.is_dir() or parts[:1] == ("__MACOSX",) or parts[-1:] == (".DS_Store",)


def _checked(info: zipfile.ZipInfo) -> PurePosixPath:
    """The path of a member. Raises DataError if it leads out of the folder or is no regular file."""
    path = PurePosixPath(info.filename)
    kind = stat.S_IFMT(info.external_attr >> 16)
    unsafe = path.is_absolute() or ".." in path.parts or "\\" in info.filename or ":" in info.filename
    if unsafe or kind not in (0, stat.S_IFREG):
        raise DataError(
            f"The zip file contains {info.filename!r}. Such a path or file type is not allowed in a CORE "
            f"bundle, so nothing was unpacked. {ADVICE}"
        )
    return path
