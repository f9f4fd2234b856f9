#!/usr/bin/env python3
"""Find the TCP ports of a host that answer this machine: a connect scan, standard library only.

python3 tests/e2e/scan.py 192.168.1.10 22 29500 5000-5010

Prints one JSON object {port: answer}. `open`: the host accepts the connection; `closed`: it refuses it. A
port without an answer within the time, as behind a filter, is left out.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor


def ports_of(words: Iterable[str]) -> list[int]:
    """The ports in words such as `22` and `5000-5010`, as numbers."""
    ports: list[int] = []
    for word in words:
        low, _, high = word.partition("-")
        ports += range(int(low), int(high or low) + 1)
    return ports


def answer(address: str, port: int, seconds: float) -> str:
    """Try to connect to a port: "open", "closed", or "" without an answer within `seconds`."""
    try:
        with socket.create_connection((address, port), seconds):
            return "open"
    except ConnectionRefusedError:
        return "closed"
    except OSError:
        return ""


def scan(address: str, ports: Sequence[int], seconds: float) -> dict[int, str]:
    """Try all ports at the same time; returns port -> "open" or "closed" for those that answer."""
    with ThreadPoolExecutor(512) as pool:
        answers = pool.map(lambda port: answer(address, port, seconds), ports)
        return {port: printed for port, printed in zip(ports, answers, strict=True) if printed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address", help="IPv4 or IPv6 address, or name")
    parser.add_argument("ports", nargs="+", help="ports and ranges, such as 22 5000-5010")
    parser.add_argument("--seconds", type=float, default=3.0, help="to wait for each answer")
    args = parser.parse_args()
    print(json.dumps(scan(args.address, ports_of(args.ports), args.seconds)))


if __name__ == "__main__":
    main()
