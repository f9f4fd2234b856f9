"""The table of nanochat's launch arguments names all of them, and only settings that exist here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "nanochat-arguments.md"
SAMPLE = ROOT / "inventory" / "sample"
# Of scripts.base_train at karpathy/nanochat 92d63d4, July 2026.
UPSTREAM = (
    "run",
    "device-type",
    "fp8",
    "fp8-recipe",
    "depth",
    "aspect-ratio",
    "head-dim",
    "max-seq-len",
    "window-pattern",
    "num-iterations",
    "target-flops",
    "target-param-data-ratio",
    "device-batch-size",
    "total-batch-size",
    "embedding-lr",
    "unembedding-lr",
    "weight-decay",
    "matrix-lr",
    "scalar-lr",
    "warmup-steps",
    "warmdown-ratio",
    "final-lr-frac",
    "resume-from-step",
    "eval-every",
    "eval-tokens",
    "core-metric-every",
    "core-metric-max-per-task",
    "sample-every",
    "save-every",
    "model-tag",
)
LAUNCH = (
    "--nnodes",
    "--nproc-per-node",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "NANOCHAT_BASE_DIR",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if "`" in row[0] or row[1].startswith("`")]


def settings_that_exist() -> set[str]:
    files = [SAMPLE / "group_vars" / "fleet.yml", SAMPLE / "hosts.yml"]
    return {
        name for file in files for name in re.findall(r"^ *#? *([a-z_]+):", file.read_text(), re.MULTILINE)
    }


def test_every_argument_of_base_train_and_of_its_launch_has_a_row() -> None:
    named = {name for row in rows() for name in re.findall(r"`([^`=]+)`", row[0])}
    assert named >= {f"--{name}" for name in UPSTREAM} | set(LAUNCH)


def test_every_setting_that_the_table_names_exists() -> None:
    named = {name for row in rows() for name in re.findall(r"`([a-z_]+)`", row[1])} - {"num_iterations"}
    assert len(named) >= 40
    assert named - settings_that_exist() - {"fleet", "coordinator"} == set()  # groups of the inventory
