"""Filters that compare the training data of all hosts of a play: shards, and the token rows made of them.

Each difference is a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import unlike_most

MOST_PHRASES = 5  # of one host; a folder that was emptied would fill the screen


def dataset_phrases(phrases: Sequence[str]) -> str:
    """Phrases about the files of a host as one line, such as "shard_00000.parquet is missing".

    phrases: the first five of them are shown, then the number of further ones.
    """
    more = len(phrases) - MOST_PHRASES
    return "; ".join(phrases[:MOST_PHRASES]) + (f"; and {more} more" if more > 0 else "")


def dataset_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Sentences about hosts whose data files are wrong, or whose manifest differs from that of most hosts.

    hosts: names, in the order of the sentences. hostvars: variables by host;
    hostvars[host]["__dataset_verified"] is the result of the module verify_shards, which compares the data
    files with the manifest.
    """
    seen = {host: hostvars[host].get("__dataset_verified") or {} for host in hosts}
    found = [
        f"{host}: {dataset_phrases(each['findings'])}." for host, each in seen.items() if each.get("findings")
    ]
    manifests = {host: each["manifest_sha256"] for host, each in seen.items() if each.get("manifest_sha256")}
    return found + [
        f"{host}: the digest of its manifest.json is {manifest[:12]}, on the others {usual[:12]}."
        for host, manifest, usual in unlike_most(manifests)
    ]


def dataset_rows_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose training rows, made from its data, differ from those of most hosts.

    hosts: names. hostvars: variables by host; hostvars[host]["__dataset_packed"] is the registered result
    of `trainer prepare --rows` there.
    """
    rows = {host: dataset_rows(hostvars[host].get("__dataset_packed")) for host in hosts}
    digests = {host: rows_digest(each) for host, each in rows.items() if each}
    return [
        f"{host} has training rows with the digests {digest}, the others have {usual}."
        for host, digest, usual in unlike_most(digests)
    ]


def rows_digest(packed: Mapping[str, Any]) -> str:
    """A text that identifies the training rows of a host: three digests, joined by slashes.

    They are the first 12 hex digits of the digests of the input, of the file for train and of the file for
    val. packed: the JSON object that `trainer prepare --rows --json` printed.
    """
    parts = (packed.get(name) or "" for name in ("digest", "train_sha256", "val_sha256"))
    return "/".join(part[:12] for part in parts if part)


def dataset_rows(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON object that `trainer prepare --rows --json` printed; {} if it did not run (check mode).

    result: the registered result of the task.
    """
    lines = [line for line in str((result or {}).get("stdout") or "").splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}
