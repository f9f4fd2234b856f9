"""Measures the seconds of a CORE evaluation on one and two hosts of a lab, without the start of the ranks.

    python -m benchmarks.evaluation --lab NAME --data-dir data --out artifacts/evaluation

NAME is a lab of two or more hosts that setup.yml has set up with the same data:

    ansible-playbook lab.yml -e lab_state=up -e lab_name=NAME
    ansible-playbook -i .lab/NAME/inventory setup.yml -e data_dir=data

CORE is the metric of DCLM over tasks of several types. Trains a model of depth 4 for a few steps, then
evaluates it --repeats times on one host and on two, in turn. The tasks are written for this benchmark: one of
each type, with random words as texts, which take the same time as real texts. While one host evaluates alone,
the other host is idle. Prints a table and writes evaluation.json to OUT. The exit code is 1 if two hosts are
less than TARGET times as fast as one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import ranks, record
from benchmarks.elastic_lab import RUNS, Lab
from benchmarks.lab import machine
from trainer.formatting import markdown_table

TARGET = 1.8  # two hosts against one
RUN = "evaluation"
FOLDER = "/var/tmp/nanofleet-evaluation"  # on each host
PYTHON = "/opt/nanofleet/venv/bin/python"
STORE_PORT = 29500
SHOTS = 3
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")


def write_bundle(folder: Path, items: int) -> None:
    """Write a CORE bundle to `folder`: core.yaml, eval_meta_data.csv, and three tasks with `items` items."""
    draw = random.Random(1)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def item(kind: str) -> dict[str, Any]:
        if kind == "multiple_choice":
            return {
                "query": text(8, 16),
                "choices": [text(1, 4) for _ in range(4)],
                "gold": draw.randrange(4),
            }
        if kind == "schema":
            return {"context_options": [text(6, 12), text(6, 12)], "continuation": text(2, 6), "gold": 0}
        return {"context": text(10, 20), "continuation": text(1, 2)}

    (folder / "eval_data").mkdir(parents=True, exist_ok=True)
    tasks = []
    for kind in ("multiple_choice", "schema", "language_modeling"):
        lines = "".join(json.dumps(item(kind)) + "\n" for _ in range(items))
        (folder / "eval_data" / f"{kind}.jsonl").write_text(lines, encoding="utf-8")
        tasks.append(
            {"label": kind, "icl_task_type": kind, "dataset_uri": f"{kind}.jsonl", "num_fewshot": [SHOTS]}
        )
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))  # which is YAML, too
    rows = "".join(f"{task['label']},25\n" for task in tasks)
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{rows}", encoding="utf-8")


def evaluate(lab: Lab, hosts: int, checkpoint: str, items: int) -> tuple[float, float]:
    """Evaluate a checkpoint on the first `hosts` hosts of the lab.

    Returns (seconds of all tasks on rank 0, mean accuracy of the tasks). checkpoint: its path on the hosts.
    items: the largest number of items of a task. Raises SystemExit if rank 0 prints no result.
    """
    address = lab.inside(1, "hostname -I").split()[0]
    command = (
        f"cd /tmp && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 {PYTHON} -m torch.distributed.run "
        f"--nnodes={hosts} --nproc-per-node=1 --master-addr={address} --master-port={STORE_PORT} "
        f"--node-rank={{rank}} -m trainer eval --checkpoint {checkpoint} --core {FOLDER} "
        f"--core-max-per-task {items} --json 2>&1"
    )
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda rank: lab.inside(rank + 1, command.format(rank=rank)), range(hosts)))
    lines = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    tasks = [line for line in lines if line.get("event") == "core_task"]
    if not tasks:
        raise SystemExit(outputs[0][-2000:])
    return sum(task["seconds"] for task in tasks), statistics.mean(task["accuracy"] for task in tasks)


def table(seconds: Mapping[int, list[float]]) -> str:
    one = statistics.median(seconds[1])
    rows = [
        [str(hosts), f"{statistics.median(found):.1f}", f"{min(found):.1f} to {max(found):.1f}",
         f"{one / statistics.median(found):.2f}"]
        for hosts, found in seconds.items()
    ]  # fmt: skip
    return markdown_table([["hosts", "s, median", "from, to", "times as fast as one"], *rows])


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each case (%(default)s)")
    parser.add_argument("--items", type=int, default=64, metavar="N", help="of each task (%(default)s)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(args.lab, 2, args.data_dir)
    settings = {"depth": 4, "sequence_len": 256, "steps": 5, "eval_every": 0, "sample_every": 0}
    lab.play("train.yml", run_id=RUN, tracker="none", doctor="never", **settings)
    lab.inside(1, f"while systemctl is-active -q nanofleet-{RUN}; do sleep 1; done")
    write_bundle(args.out / "core", args.items)
    for number in (1, 2):
        lab.inside(number, f"rm -rf {FOLDER}")
        lab.podman("cp", str(args.out / "core"), f"{lab.host(number)}:{FOLDER}")
    checkpoint = lab.inside(1, f"ls -d {RUNS}/{RUN}/checkpoints/*").split()[-1]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    accuracies = set()
    for _ in range(args.repeats):
        for hosts, found in seconds.items():
            spent, accuracy = evaluate(lab, hosts, checkpoint, args.items)
            found.append(spent)
            accuracies.add(accuracy)
            print(f"{hosts} of 2 hosts: {spent:.1f} s", file=sys.stderr, flush=True)
    if len(accuracies) != 1:
        raise SystemExit(f"one and two hosts have different accuracies: {sorted(accuracies)}")
    for number in (1, 2):
        lab.inside(number, f"rm -rf {FOLDER} {RUNS}/{RUN}")
    print(table(seconds))
    found_all = {
        **record.origin("python -m benchmarks.evaluation"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "items": args.items,
        "seconds": {str(hosts): each for hosts, each in seconds.items()},
    }
    (args.out / "evaluation.json").write_text(json.dumps(found_all, indent=1) + "\n", encoding="utf-8")
    return 0 if statistics.median(seconds[1]) >= TARGET * statistics.median(seconds[2]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
