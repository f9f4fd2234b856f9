"""The facts of a run for the tracker: settings and derived values as params, the rest as tags.

Params cannot change on an MLflow server, so values that may differ between attempts (hosts, shares) are tags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.code_digest import code_digest
from trainer.config import RunFile
from trainer.tracking.files import Facts

if TYPE_CHECKING:
    from trainer.data.rows import RowsInfo
    from trainer.model.gpt import GPT
    from trainer.run_plan import Plan


def facts_of(
    run_file: RunFile,
    config_digest: str,
    plan: Plan,
    model: GPT,
    rows: RowsInfo,
    hashes: Mapping[str, str],
    hosts: Sequence[str],
    host_facts: Sequence[Mapping[str, str]],
    more_tags: Mapping[str, str],
) -> Facts:
    """The content of facts.json for this attempt.

    run_file, plan, model, rows: run file, plan, model and packed rows of the run.
    config_digest: digest of the run's settings.
    hashes: {name: digest} of the run's data.
    hosts: the host of each rank, in rank order. host_facts: {fact: text} of each rank, in rank order.
    more_tags: {tag: text} on the sync mode and the predicted step time.
    Settings and values derived from them become params; the rest becomes tags.
    """
    tokens, flops = plan.total_batch_size * plan.num_iterations, model.flops_per_token()
    derived: dict[str, Any] = {
        **{f"model.{name}": value for name, value in dataclasses.asdict(plan.model).items()},
        **{f"scale.{name}": value for name, value in plan.scales._asdict().items()},
        **{f"parameters.{name}": count for name, count in model.param_counts().items()},
        "plan.scaling_params": plan.scaling_params,
        "plan.total_batch_size": plan.total_batch_size,
        "plan.rows_per_step": plan.rows_per_step,
        "plan.num_iterations": plan.num_iterations,
        "plan.tokens": tokens,
        "plan.tokens_per_scaling_param": tokens / plan.scaling_params,
        "plan.epochs": tokens / (rows.train_rows * plan.model.sequence_len),
        "plan.flops_per_token": flops,
        "plan.flops": flops * tokens,
    }
    stage = {"stage": run_file.config.stage}
    if run_file.config.parent:
        stage |= {"parent_run": run_file.config.parent.partition("/")[0]}
    tags = {
        **stage,
        "digest.config": config_digest,
        "digest.run_file": run_file.digest(),
        "digest.trainer": code_digest(),
        **{f"digest.{name}": value for name, value in hashes.items()},
        "hosts": " ".join(hosts),
        "world_size": str(len(hosts)),
        "shares": "/".join(map(str, plan.shares)),
        **{f"host.{rank}.{key}": value for rank, of in enumerate(host_facts) for key, value in of.items()},
        **more_tags,
    }
    params = {name: str(value) for name, value in {**run_file.config.to_dict(), **derived}.items()}
    return Facts(run_file.run_id, config_digest, params, tags, run_file.config.experiment)
