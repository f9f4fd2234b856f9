"""Compares the shards and the tokenizer of a data directory with its manifest, by sha256.

The file STORED beside the data holds the sha256 of each file (see file_digests.py): a second comparison reads
only files that were written since.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import Digests

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer/tokenizer.json"
STORED = ".verified.json"


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of a manifest: {"shards": [(name, sha256, bytes)], "tokenizer": sha256}.

    Raises ValueError if the file cannot be read or is not a manifest.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = [(str(each["name"]), str(each["sha256"]), int(each["bytes"])) for each in manifest["shards"]]
        return {"shards": shards, "tokenizer": str(manifest["tokenizer_sha256"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a manifest: {error!r}. On a host, send the data again: "
            "ansible-playbook setup.yml. On the controller, make the data again: repeat the command python "
            "-m trainer prepare with the options that made them"
        ) from None


def fault(digests: Digests, name: str, path: Path, sha256: str, size: int | None = None) -> str:
    """A phrase if a file is missing or differs from the manifest; "" if it is correct.

    digests: the stored sha256 of the files. name: the name of the file, with which the phrase begins. path:
    its path. sha256, size: the values in the manifest; size is in bytes, None if any size is correct.
    """
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    if size is not None and found != size:
        return f"{name} has {found} bytes instead of {size}"
    altered = digests.sha256(name, path) != sha256
    return f"{name} was altered (its sha256 is not the manifest's)" if altered else ""


def verify(folder: Path, manifest_sha256: str, remember: bool = True) -> dict[str, Any]:
    """Compare a data directory with its manifest. Returns the result of the module verify_shards.

    folder: the data directory. manifest_sha256: the sha256 that the manifest has to have, "" for any.
    remember: whether each sha256 is stored beside the data. Keys of the result: findings (phrases),
    manifest_sha256, shards (their number), bytes (of all shards), hashed (number of files that were read).
    Raises ValueError for an invalid manifest.
    """
    path = folder / MANIFEST
    result: dict[str, Any] = {"findings": [], "manifest_sha256": "", "shards": 0, "bytes": 0, "hashed": 0}
    if not path.is_file():
        return {**result, "findings": [f"{MANIFEST} is missing"]}
    result["manifest_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if manifest_sha256 not in ("", result["manifest_sha256"]):
        return {**result, "findings": [f"{MANIFEST} is not the controller's"]}
    manifest, digests = read_manifest(path), Digests(folder / STORED)
    names = {name for name, _, _ in manifest["shards"]}
    found = [
        fault(digests, name, folder / "shards" / name, sha, size) for name, sha, size in manifest["shards"]
    ]
    found.append(fault(digests, TOKENIZER, folder / TOKENIZER, manifest["tokenizer"]))
    here = {each.name for each in (folder / "shards").glob("*")}
    found += [f"{name} is not in the manifest" for name in sorted(here - names)]
    if remember:
        digests.save()
    result |= {"shards": len(names), "bytes": sum(size for _, _, size in manifest["shards"])}
    return {**result, "findings": [each for each in found if each], "hashed": digests.hashed}
