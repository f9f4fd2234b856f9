#!/usr/bin/python
"""Ansible module: compare the shards and the tokenizer of a data directory with its manifest, by sha256.

The file STORED beside the data holds the sha256 of each file, with its size, mtime and ctime. A second
comparison reads only files for which one of these has changed. Writing to a file always changes its ctime,
even if the mtime is set back. Not detected are errors below the file system: a disk that returns other bytes
than were written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json, write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer/tokenizer.json"
STORED = ".verified.json"


class Digests:
    """The stored sha256 of the files of a data directory, read from and saved to STORED.

    {name: [size, mtime in ns, ctime in ns, sha256]}. hashed: number of files that were read.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.hashed = folder / STORED, 0
        self.known: dict[str, list[Any]] = load_json(str(self.path)) or {}
        self.kept: dict[str, list[Any]] = {}

    def sha256(self, name: str, path: Path) -> str:
        status = path.stat()
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = self.known.get(name)
        if not (isinstance(entry, list) and entry[:3] == key and len(entry) == 4):
            with path.open("rb") as file:
                entry = [*key, hashlib.file_digest(file, "sha256").hexdigest()]
            self.hashed += 1
        self.kept[name] = entry
        return str(entry[3])

    def save(self) -> None:
        if self.kept == self.known:
            return
        # Without the file the next comparison only takes longer.
        with contextlib.suppress(PermissionError):
            write_whole(str(self.path), json.dumps(self.kept))


def read_manifest(path: Path) -> dict[str, Any]:
    """{"shards": [(name, sha256, bytes)], "tokenizer": sha256} of a manifest. Raises ValueError."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        shards = [(str(each["name"]), str(each["sha256"]), int(each["bytes"])) for each in manifest["shards"]]
        return {"shards": shards, "tokenizer": str(manifest["tokenizer_sha256"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a manifest: {error!r}. On a host, send the data again: "
            "ansible-playbook setup.yml. On the controller, make them again: python -m trainer prepare"
        ) from None


def fault(digests: Digests, name: str, path: Path, sha256: str, size: int | None = None) -> str:
    """How a file of the data differs from the manifest, as a phrase that begins with `name`; else "".

    digests: the stored digests. path: of the file. sha256, size: as the manifest lists them.
    """
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    if size is not None and found != size:
        return f"{name} has {found} bytes instead of {size}"
    altered = digests.sha256(name, path) != sha256
    return f"{name} was altered (its sha256 is not the manifest's)" if altered else ""


def verify(folder: Path, manifest_sha256: str, remember: bool = True) -> dict[str, Any]:
    path = folder / MANIFEST
    result: dict[str, Any] = {"findings": [], "manifest_sha256": "", "shards": 0, "bytes": 0, "hashed": 0}
    if not path.is_file():
        return {**result, "findings": [f"{MANIFEST} is missing"]}
    result["manifest_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if manifest_sha256 not in ("", result["manifest_sha256"]):
        return {**result, "findings": [f"{MANIFEST} is not the controller's"]}
    manifest, digests = read_manifest(path), Digests(folder)
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


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest_sha256": {"type": "str", "default": ""},
            "user": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        with acting_as(p["user"]):
            result = verify(Path(p["path"]), p["manifest_sha256"], not module.check_mode)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
