#!/usr/bin/env python3
"""Which TCP ports of a host answer this machine: a connect scan, standard library only.

python3 scripts/scan.py 192.168.1.10 22 5000 29500 20000-20999

Prints one JSON object, {port: answer} of the ports that answer: `open` takes the connection, `closed` refuses
it. A port that is left out gave no answer within the time, as behind a filter.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor


def ports_of(words: Iterable[str]) -> list[int]:
    """`22`, `20000-20999` -> the ports."""
    ports: list[int] = []
    for word in words:
        low, _, high = word.partition("-")
        ports += range(int(low), int(high or low) + 1)
    return ports


def answer(address: str, port: int, seconds: float) -> str:
    """open, closed, or empty where nothing came back."""
    try:
        with socket.create_connection((address, port), seconds):
            return "open"
    except ConnectionRefusedError:
        return "closed"
    except OSError:
        return ""


def scan(address: str, ports: Sequence[int], seconds: float) -> dict[int, str]:
    """The answer of each port that gave one."""
    with ThreadPoolExecutor(512) as pool:
        answers = pool.map(lambda port: answer(address, port, seconds), ports)
        return {port: said for port, said in zip(ports, answers, strict=True) if said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address", help="IPv4 or IPv6 address, or name")
    parser.add_argument("ports", nargs="+", help="ports and ranges, such as 22 20000-20999")
    parser.add_argument("--seconds", type=float, default=3.0, help="to wait for each answer")
    args = parser.parse_args()
    print(json.dumps(scan(args.address, ports_of(args.ports), args.seconds)))


if __name__ == "__main__":
    main()
