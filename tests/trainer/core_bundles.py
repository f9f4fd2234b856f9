"""CORE bundles for tests: that of golden_chat.json written as files, and its model and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from golden_chat import GOLDEN
from reference import fill_by_formula

from trainer.model.gpt import GPT, GPTConfig

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "core"


def golden_model() -> GPT:
    model = GPT(GPTConfig(**GOLDEN["config"]))
    torch.manual_seed(0)
    model.init_weights()
    fill_by_formula(model)
    return model.eval()


def write_bundle(folder: Path, tasks: list[dict[str, Any]], baselines: dict[str, float]) -> Path:
    """Write tasks as in golden_chat.json to a bundle in `folder`, which is created."""
    import yaml

    (folder / "eval_data" / "some").mkdir(parents=True)
    entries = []
    for task in tasks:
        uri = f"some/{task['label']}.jsonl"
        lines = "".join(json.dumps(item) + "\n" for item in task["data"])
        (folder / "eval_data" / uri).write_text(lines, encoding="utf-8")
        entry = {"label": task["label"], "icl_task_type": task["task_type"], "dataset_uri": uri}
        entry |= {"num_fewshot": [task["num_fewshot"]]}
        if task["continuation_delimiter"] != " ":
            entry["continuation_delimiter"] = task["continuation_delimiter"]
        entries.append(entry)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}), encoding="utf-8")
    rows = "".join(f'{label},"a task, of words",{percent}\n' for label, percent in baselines.items())
    (folder / "eval_meta_data.csv").write_text("Eval Task,Description,Random baseline\n" + rows)
    return folder


def golden_bundle(folder: Path) -> Path:
    return write_bundle(folder, GOLDEN["core"]["tasks"], GOLDEN["core"]["random_baseline_percent"])
