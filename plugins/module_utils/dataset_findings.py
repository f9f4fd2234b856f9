"""Filters over all hosts of a play: whose data differ, in sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import unlike_most

MOST_PHRASES = 5  # of one host; a folder that was emptied would fill the screen


def dataset_phrases(phrases: Sequence[str]) -> str:
    """A host's findings in one line."""
    more = len(phrases) - MOST_PHRASES
    return "; ".join(phrases[:MOST_PHRASES]) + (f"; and {more} more" if more > 0 else "")


def dataset_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose files are not those of its manifest, or whose manifest is another."""
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
    """A sentence for each host whose packed rows are not those of most others."""
    rows = {host: dataset_rows(hostvars[host].get("__dataset_packed")) for host in hosts}
    digests = {host: rows_digest(each) for host, each in rows.items() if each}
    return [
        f"{host} packed rows {digest}, the others {usual}: "
        "its data or its environment differ. Run setup.yml for all hosts, then try again."
        for host, digest, usual in unlike_most(digests)
    ]


def rows_digest(packed: Mapping[str, Any]) -> str:
    """What rows were asked for, and the bytes that came out."""
    parts = (packed.get(name) or "" for name in ("digest", "train_sha256", "val_sha256"))
    return "/".join(part[:12] for part in parts if part)


def dataset_rows(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON line of `trainer prepare --rows --json`; empty where nothing was run (check mode)."""
    lines = [line for line in str((result or {}).get("stdout") or "").splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}
