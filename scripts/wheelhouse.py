"""Make the wheelhouses for one kind of host, for a controller that has no network.

    python scripts/wheelhouse.py --python 3.11 --machine x86_64              the CPU build of torch
    python scripts/wheelhouse.py --python 3.12 --machine x86_64 --torch cuda

Type it on a machine with a network, in the same checkout and after `make venv`. Copy the folders that it
makes to .wheelhouse/ of the controller, and set up with `-e wheelhouse_offline=true`. Wheels that are there
already are not fetched again.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import runtime_kind
from ansible_collections.nanofleet.fleet.plugins.modules import wheelhouse

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SETS = {
    "train": True,
    "tracker": False,
}  # extras that setup.yml installs, with the project's own wheel or without


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="wheelhouse.py", description=(__doc__ or "").splitlines()[0])
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser.add_argument("--python", default=here, help="the hosts' Python (%(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="as uname -m has it (%(default)s)")
    parser.add_argument("--torch", choices=("cpu", "cuda"), default="cpu", help="torch's build (cpu)")
    # A URL with a password is better given by the environment, which other users cannot read.
    index = os.environ.get("TORCH_INDEX_URL")
    parser.add_argument(
        "--torch-index", default=index, help="URL or folder asked for torch (TORCH_INDEX_URL)"
    )
    parser.add_argument(
        "--require-hashes", action="store_true", help="refuse wheels without a committed hash"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".wheelhouse", help="where to (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    index = args.torch_index or (CPU_INDEX if args.torch == "cpu" else "")
    for extra, project in SETS.items():
        # The tracker has no torch, and so its kind is that of a CPU host.
        torch = {"torch": args.torch, "index": index} if project else {"torch": "cpu", "index": CPU_INDEX}
        kind = runtime_kind({"python": args.python, "machine": args.machine}, **torch)["name"]
        wanted: dict[str, Any] = {
            "source": str(ROOT),
            "dest": str(args.out.resolve() / kind / extra),
            "constraints": str(ROOT / "constraints.txt"),
            "hashes": str(ROOT / "requirements" / "hashes.txt"),
            "require_hashes": args.require_hashes,
            "extra": extra,
            "project": project,
            "python_version": args.python,
            "architecture": args.machine,
            "torch": torch["torch"],
            "torch_index": torch["index"],
            "offline": False,
        }
        try:
            made = wheelhouse.run(wanted, False)
        except (wheelhouse.WheelhouseError, ValueError, OSError) as error:
            print(f"wheelhouse: {error}", file=sys.stderr)
            return 1
        state = "made" if made["changed"] else "unchanged"
        print(f"{wanted['dest']}: {made['wheels']} wheels, {made['bytes'] / 1e6:.0f} MB, {state}")
        print(f"  sha256 of its lock: {made['digest']}")
        if made["unverified"]:
            print(f"  trusted as first downloaded, no hash was committed: {', '.join(made['unverified'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
