"""Record the console blocks of the documentation on a lab.

    make demo && python -m scripts.docs_console     # inventory/lab; a depth-2 run is started and stopped
    python -m scripts.docs_console --write          # records nothing, writes the pages from docs/recorded

docs/recorded/NAME.txt holds the report that a playbook printed at its end, without the list of tasks. A page
shows this report between `<!-- recorded: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import yaml

from scripts.generated import ROOT, stale, update

DOCS = ROOT / "docs"
RECORDED = DOCS / "recorded"
RUN = "first"
COMMANDS = {
    "doctor": "ansible-playbook doctor.yml",
    "train": f"ansible-playbook train.yml -e depth=4 -e steps=500 -e run_id={RUN}",
    "status": "ansible-playbook status.yml",
    "logs": "ansible-playbook logs.yml -e log_lines=6",
    "stop": "ansible-playbook stop.yml",
}
"""Name of a record -> command, in the order in which the commands run."""
ADDED = {"train": " -e sequence_len=256 -e total_batch_size=2048 -e launch_stall_seconds=60"}
"""Name of a record -> more options for a lab on two cores, which the record does not show."""
HOSTS = ("tower", "laptop")
ADDRESSES = ("192.168.1.10", "192.168.1.11")
BLOCK = re.compile(r"<!-- recorded: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
MESSAGE = re.compile(r"^ +msg: (?:\|-?\n((?: {8}.*\n|\n)+)|(.+(?:\n {8}.*)*))", re.MULTILINE)


class RecordError(Exception):
    """Raised if a command fails or prints no report."""


def report(output: str) -> str:
    """The last message in the output of a playbook, without Ansible's indentation.

    Raises RecordError if there is no message.
    """
    found = MESSAGE.findall(output)
    if not found:
        raise RecordError(f"The playbook printed no report:\n{output[-2000:]}")
    literal, folded = found[-1]
    return textwrap.dedent(literal).strip() if literal else " ".join(folded.split()).strip("'\"")


def renamed(text: str, hosts: dict[str, str]) -> str:
    """`text` with HOSTS and ADDRESSES instead of those of the lab, and without `-i INVENTORY`.

    hosts: name -> address of the lab's hosts, in rank order.
    """
    for (name, address), host, other in zip(hosts.items(), HOSTS, ADDRESSES, strict=True):

        def padded(found: re.Match[str], host: str = host) -> str:
            """The new name. Before two or more spaces, as in a table, it is padded to the old width."""
            return host + " " * max(2, len(found[0]) - len(host)) if found[1] else host

        text = re.sub(rf"{re.escape(name)}( {{2,}})?", padded, text).replace(address, other)
    return re.sub(r" -i \S+", "", text)


def record(inventory: Path) -> None:
    """Run COMMANDS on the two hosts of `inventory`, and write docs/recorded/*.txt.

    inventory: the folder of the inventory. setup.yml has to have run on its hosts. Raises RecordError if a
    command fails or prints no report.
    """
    listed = yaml.safe_load((inventory / "hosts.yml").read_text(encoding="utf-8"))
    hosts = {
        name: of_host["ansible_host"]
        for group in ("coordinator", "workers")
        for name, of_host in listed[group]["hosts"].items()
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    where = f"two hosts in containers on one machine with {os.cpu_count()} cores"
    header = f"Recorded on {time.strftime('%Y-%m-%d')} at commit `{commit}`: {where}."
    RECORDED.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            [*(command + ADDED.get(name, "")).split(), "-i", str(inventory)],
            cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        )  # fmt: skip
        if done.returncode:
            raise RecordError(f"{command} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        printed = renamed(report(done.stdout), hosts)
        note = f" The command had also{ADDED[name]}." if name in ADDED else ""
        (RECORDED / f"{name}.txt").write_text(f"{header}{note}\n$ {command}\n{printed}\n", encoding="utf-8")


def block(name: str) -> str:
    """The part of a page that shows the record `name`, with its markers."""
    header, console = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").split("\n", 1)
    return f"<!-- recorded: {name} -->\n```console\n{console}```\n\n{header}\n<!-- end -->"


def pages() -> dict[Path, str]:
    """{path: text} of every page of docs/, with the present records in its console blocks."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    return {page: BLOCK.sub(lambda match: block(match[1]), text) for page, text in texts.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="docs_console.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--inventory", type=Path, default=ROOT / "inventory" / "lab", help="of two set-up hosts (%(default)s)"
    )
    parser.add_argument(
        "--write", action="store_true", help="record nothing, write the pages from the records"
    )
    args = parser.parse_args(argv)
    try:
        if not args.write:
            record(args.inventory)
    except (RecordError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    update(stale(pages()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
