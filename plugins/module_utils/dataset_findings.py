"""Filters that compare the data and packed rows of all hosts of a play. Each difference is a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import unlike_most

MOST_PHRASES = 5  # of one host; a folder that was emptied would fill the screen


def dataset_phrases(phrases: Sequence[str]) -> str:
    """The first five phrases about the files of a host in one line, with the number of further ones."""
    more = len(phrases) - MOST_PHRASES
    return "; ".join(phrases[:MOST_PHRASES]) + (f"; and {more} more" if more > 0 else "")


def dataset_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose files differ from its manifest, or whose manifest from most hosts'.

    Reads the result of verify_shards from hostvars[host]["__dataset_verified"].
    """
    seen = {host: hostvars[host].get("__dataset_verified") or {} for host in hosts}
    found = [
        f"{host}: {dataset_phrases(each['findings'])}." for host, each in seen.items() if each.get("findings")
    ]
    manifests = {host: each["manifest_sha256"] for host, each in seen.items() if each.get("manifest_sha256")}
    return found + [
        f"{host}: its manifest is {manifest[:12]}, that of the others {usual[:12]}."
        for host, manifest, usual in unlike_most(manifests)
    ]


def dataset_rows_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose packed rows have another digest than those of most hosts."""
    rows = {host: dataset_rows(hostvars[host].get("__dataset_packed")) for host in hosts}
    digests = {host: rows_digest(each) for host, each in rows.items() if each}
    return [
        f"{host} packed rows {digest}, the others {usual}." for host, digest, usual in unlike_most(digests)
    ]


def rows_digest(packed: Mapping[str, Any]) -> str:
    """The digests of the input (`digest`) and of the packed files (`train_sha256`, `val_sha256`).

    The first 12 digits of each, joined by slashes.
    """
    parts = (packed.get(name) or "" for name in ("digest", "train_sha256", "val_sha256"))
    return "/".join(part[:12] for part in parts if part)


def dataset_rows(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON object that `trainer prepare --rows --json` printed; {} if it did not run (check mode).

    result: the registered result of the task.
    """
    lines = [line for line in str((result or {}).get("stdout") or "").splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}
