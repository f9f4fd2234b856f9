"""The names of a run's figures on an MLflow server.

Figures that nanochat logs too have nanochat's names. The other figures have names of their own, in groups:
MLflow's page groups metrics by the part before the slash. metrics.jsonl keeps the names of earlier releases;
figures are renamed only when they are sent.
"""

from __future__ import annotations

import re

from trainer.health.run_status import STEP_PHASES

# Figure in metrics.jsonl -> metric. Those of nanochat's base_train come first.
METRICS = {
    "smooth_loss": "train/loss",
    "lr_multiplier": "train/lrm",
    "step_seconds": "train/dt",
    "tok_per_s": "train/tok_per_sec",
    "mfu": "train/mfu",
    "epoch": "train/epoch",
    "val_bpb": "val/bpb",
    "core_metric": "core_metric",
    "total_training_flops": "total_training_flops",
    "total_training_time": "total_training_time",
    "loss": "train/step_loss",
    "lr": "train/lr",
    "val_loss": "val/loss",
    **{f"{phase}_s": f"phase_seconds/{phase}" for phase in STEP_PHASES},
    "bytes_sent": "network/bytes_sent",
    "predicted_step_seconds": "prediction/step_seconds",
    "measured_step_seconds": "prediction/measured_step_seconds",
}
ROWS = "rows."  # begins the figures of the batch split, rows.RANK
KEY_CHARACTERS = 250  # MLflow's limit


def metric_of(figure: str) -> str:
    """The name on the server of `figure`, a name in metrics.jsonl or system.jsonl.

    A name that METRICS does not list, such as system/NAME, is kept, but rows.RANK becomes
    batch_split/rank_RANK. Characters that MLflow does not allow are replaced (see `clean_key`).
    """
    if figure.startswith(ROWS):
        return f"batch_split/rank_{figure.removeprefix(ROWS)}"
    return clean_key(METRICS.get(figure, figure))


def clean_key(name: str) -> str:
    """`name` as a valid MLflow key: letters, digits, blanks and _-.:/, no relative path, not too long.

    Other characters become "_". The key has KEY_CHARACTERS characters at most.
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip(". "))[:KEY_CHARACTERS] or "_"
