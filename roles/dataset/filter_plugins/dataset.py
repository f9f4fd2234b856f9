"""Filters over all hosts of a play: whose data differ, in sentences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any


def dataset_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose files are not those of the manifest."""
    found = []
    for host in hosts:
        phrases = (hostvars[host].get("__dataset_verified") or {}).get("findings") or []
        if phrases:
            found.append(f"{host}: {'; '.join(phrases)}.")
    return found


def dataset_rows_findings(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """A sentence for each host whose packed rows are not those of most others."""
    rows = {host: dataset_rows(hostvars[host].get("__dataset_packed")) for host in hosts}
    usual = Counter(each["digest"] for each in rows.values() if each).most_common(1)
    return [
        f"{host} packed rows {each['digest'][:16]}, the others {usual[0][0][:16]}: "
        "its data or its environment differ. Run setup.yml for all hosts, then try again."
        for host, each in rows.items()
        if each and each["digest"] != usual[0][0]
    ]


def dataset_rows(result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON line of `trainer prepare --rows --json`; empty where nothing was run (check mode)."""
    lines = [line for line in str((result or {}).get("stdout") or "").splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "dataset_findings": dataset_findings,
            "dataset_rows": dataset_rows,
            "dataset_rows_findings": dataset_rows_findings,
        }
