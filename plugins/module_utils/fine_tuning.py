"""The decision of train.yml about a run of stage sft: its settings, and the checkpoint that it begins with.

Pure functions of the result of the module parent_checkpoint. A command that is repeated finds the run that it
has started before, even if the run that provides the checkpoint (the base run) has been trained further
since, or the checkpoint has been removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.trainer.config import ConfigError, RunConfig, check_schema
from ansible_collections.nanofleet.fleet.trainer.stages import SFT, parent_of, sft_settings

SHAPE = ("depth", "aspect_ratio", "head_dim", "n_kv_head", "window_pattern")
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders that the unit of a run does not see (ProtectHome, PrivateTmp)."""
Found = Mapping[str, Any]


class FineTuningRefusedError(Exception):
    """Raised if the run must not start; its attribute `finding` is what train.yml shows."""

    def __init__(self, reason: Finding) -> None:
        super().__init__(reason["problem"])
        self.finding = reason


def plan(
    host: str,
    found: Found,
    given: Mapping[str, Any],
    run_id: str,
    from_checkpoint: str = "",
    tokenizer_sha256: str = "",
    sandboxed: bool = True,
) -> dict[str, Any]:
    """The decision about a run of stage sft: {"config", "run_id", "arguments"}.

    Keys of the result: config ({setting: value} of the run), run_id (name of the run, "" for the default
        name) and arguments (more options of `trainer train`).
    host: name of the coordinator.
    found: the result of the module parent_checkpoint on the coordinator.
    given: {setting: value} of the settings that the user has set. run_id, from_checkpoint: the settings of
        these names, "" if they are not set.
    tokenizer_sha256: sha256 of the tokenizer with which the conversations were tokenized, "" if unknown.
    sandboxed: whether the unit of the run has no access to home directories.
    Raises FineTuningRefusedError if the run must not start.
    """
    chosen = _chosen(found, from_checkpoint)
    try:
        meta = _migrated(chosen) if chosen else None
        run = _existing(found, meta, given, run_id, from_checkpoint)
        if run:
            return _resumed(host, found, given, run, chosen)
        if not chosen or meta is None:
            raise FineTuningRefusedError(_nothing(host, found, from_checkpoint, sandboxed))
        settings = {name: value for name, value in given.items() if name != "parent"}
        _check_shape(meta, settings)
        _check_tokenizer(meta, tokenizer_sha256)
        if sandboxed and _is_hidden(chosen["path"]):
            raise FineTuningRefusedError(_hidden(host, chosen["path"], found["state_dir"]))
        config = sft_settings(meta, settings)
        RunConfig.from_strings(config)
    except ConfigError as error:
        problem = f"The fine-tuning run (stage=sft) cannot start: {error}"
        fix = (
            "repeat the command with another value of the setting that the message names or, if it names a "
            "checkpoint, with another checkpoint: -e from_checkpoint=RUN/step_NNNNNN instead of -e from_run"
        )
        raise FineTuningRefusedError(finding("NF426", "stage=sft", problem, fix)) from None
    return {"config": config, "run_id": run_id, "arguments": ["--from-checkpoint", chosen["path"]]}


def _chosen(found: Found, from_checkpoint: str) -> Mapping[str, Any] | None:
    """The checkpoint that was named, or the newest one of the base run; None if there is none."""
    saved: Sequence[Mapping[str, Any]] = found["checkpoints"]
    if from_checkpoint and not os.path.isabs(from_checkpoint):
        step = from_checkpoint.rpartition("/")[2]
        saved = [each for each in saved if os.path.basename(each["path"]) == step]
    return saved[-1] if saved else None


def _migrated(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint's meta.json, with its settings converted to those of this release.

    Raises ConfigError if meta.json is damaged or was written by a newer release.
    """
    meta = dict(checkpoint["meta"])
    check_schema(meta.get("schema"), f"The checkpoint {checkpoint['path']}")
    try:
        config = RunConfig.load(meta["config"])[0].to_dict()
        parent_of(meta)
    except (KeyError, TypeError, AttributeError, StopIteration, ValueError):
        raise ConfigError(f"The file meta.json of the checkpoint {checkpoint['path']} is damaged.") from None
    return {**meta, "config": config}


def _existing(
    found: Found, meta: Mapping[str, Any] | None, given: Mapping[str, Any], run_id: str, from_checkpoint: str
) -> Mapping[str, Any] | None:
    """The run of stage sft that this command has started before; None if the command starts a new run.

    meta: the content of meta.json of the chosen checkpoint; None if there is none. With `run_id`, the run is
    found by its name. Without it, the run has its default name and the same settings, and began with this
    checkpoint, or with an earlier one of the same base run and has not finished. Raises
    FineTuningRefusedError if the run `run_id` fine-tunes another run or checkpoint, and ConfigError if
    RunConfig refuses the settings of this run or those in `given`.
    """
    for run in found["tuned"]:
        try:
            before = RunConfig.load(run["config"])[0]
        except ConfigError:  # of another release
            if run["run_id"] == run_id:
                raise
            continue
        of_base = _is_of(before.parent, found["run"], meta, from_checkpoint)
        if run_id:
            if run["run_id"] != run_id:
                continue
            if not of_base:
                raise FineTuningRefusedError(
                    _of_another(run_id, before.parent, from_checkpoint or found["run"])
                )
            return run
        if not of_base or run["run_id"] != before.default_run_id():
            continue
        if meta is None:
            same = RunConfig.resumed(run["config"], given)
        else:
            same = RunConfig.from_strings({**sft_settings(meta, given), "parent": before.parent})
        begun_here = meta is None or before.parent == parent_of(meta)
        if same.digest() == before.digest() and (begun_here or run.get("outcome") != "finished"):
            return run
    return None


def _is_of(parent: str, run: str, meta: Mapping[str, Any] | None, from_checkpoint: str) -> bool:
    """Whether a run fine-tunes the base run `run`, or the checkpoint `from_checkpoint` if that is set.

    parent: the setting `parent` of the run, RUN_ID/step_NNNNNN/SHA256. meta: the content of meta.json of the
    checkpoint; None if it does not exist. Without `meta`, the result for an absolute path is True.
    """
    if from_checkpoint:
        if meta is not None:
            return parent == parent_of(meta)
        return os.path.isabs(from_checkpoint) or parent.startswith(f"{from_checkpoint}/")
    return parent.split("/")[0] == run


def _resumed(
    host: str,
    found: Found,
    given: Mapping[str, Any],
    run: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The result of `plan` for the existing run `run`.

    The run reads the checkpoint that it began with only until it has saved one itself. Raises
    FineTuningRefusedError if neither of the two exists. chosen: the result of `_chosen`.
    """
    parent = run["config"]["parent"]
    saved = [*found["checkpoints"], *([chosen] if chosen else [])]
    paths = [each["path"] for each in saved if parent_of(each["meta"]) == parent]
    if not paths and not run["has_checkpoint"]:
        base, step = parent.split("/")[:2]
        name = run["run_id"]
        problem = (
            f"The run {name} has no checkpoint of its own yet. It starts from {step} of the run {base}, "
            f"which {host} does not have any more."
        )
        fix = (
            f"start a new run from the newest checkpoint of {base}: repeat the command with -e run_id=NAME "
            f"-e from_run={base}, without -e from_checkpoint. Or, if the controller has the folder "
            f"runs/{base}/{host}/checkpoints/{step}, copy it back to {host}: ansible coordinator -m "
            f"ansible.builtin.copy -b -a 'src=runs/{base}/{host}/checkpoints/{step} "
            f"dest={found['state_dir']}/runs/{base}/checkpoints/ mode=a+rX', then repeat the command that "
            "failed"
        )
        raise FineTuningRefusedError(finding("NF427", host, problem, fix))
    return {
        "config": {**given, "stage": SFT, "parent": parent},
        "run_id": run["run_id"],
        "arguments": ["--from-checkpoint", paths[-1]] if paths else [],
    }


def _check_shape(meta: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    cast = RunConfig.from_strings({**meta["config"], **given})
    base = meta["config"]
    if names := [name for name in SHAPE if name in given and getattr(cast, name) != base[name]]:
        differences = ", ".join(f"{name}={getattr(cast, name)} instead of {base[name]}" for name in names)
        problem = (
            f"Fine-tuning cannot change the shape of the model of the run {meta['run_id']}, but the settings "
            f"ask for another shape: {differences}."
        )
        values = " ".join(f"-e {name}={base[name]}" for name in names)
        fix = f"repeat the command with the shape of the checkpoint: {values}"
        raise FineTuningRefusedError(finding("NF428", "stage=sft", problem, fix))


def _check_tokenizer(meta: Mapping[str, Any], sha256: str) -> None:
    own = str((meta.get("hashes") or {}).get("tokenizer") or "")
    if own and sha256 and not sha256.startswith(own):
        run = meta["run_id"]
        problem = f"The tokenizer of the conversations (from data_dir) is not that of the base run {run}."
        fix = (
            "repeat the command with -e data_dir=FOLDER, the folder on the controller with the data of "
            f"{run}; or fetch a checkpoint, which contains the tokenizer: ansible-playbook fetch.yml -e "
            f"run_id={run}, then repeat the command that failed, with -e "
            f"data_dir=runs/{run}/HOST/checkpoints/step_NNNNNN. If no host has that run any more, name a "
            "copy of the checkpoint's folder on the controller"
        )
        raise FineTuningRefusedError(finding("NF429", "data_dir", problem, fix))


def _is_hidden(path: str) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in HIDDEN)


def _hidden(host: str, path: str, state_dir: str) -> Finding:
    problem = (
        f"The systemd unit of a run cannot read {path}: the unit has no access to home directories, "
        "/run/user, /tmp and /var/tmp."
    )
    return finding("NF430", host, problem, _imported(host, path, state_dir))


def _imported(host: str, path: str, state_dir: str) -> str:
    """The fix that copies a checkpoint to a folder that the unit of a run can read."""
    folder = f"{state_dir}/imported"
    copy = f"{folder}/{os.path.basename(path.rstrip('/'))}"
    return (
        f"copy the folder to where the unit can read it: sudo mkdir -p {folder} && sudo cp -r "
        f"{path.rstrip('/')} {folder}/ && sudo chmod -R a+rX {copy}  (on {host}), then repeat the command "
        f"with -e from_checkpoint={copy}"
    )


def _of_another(run_id: str, parent: str, asked: str) -> Finding:
    base = "/".join(parent.split("/")[:2])  # without the digest
    difference = f"but the command names {asked}" if asked != base else "which has other content now"
    problem = f"The run {run_id} exists already. It fine-tunes {base}, {difference}."
    fix = "repeat the command with another name for the new run: -e run_id=NAME"
    return finding("NF431", f"-e run_id={run_id}", problem, fix)


def _nothing(host: str, found: Found, from_checkpoint: str, sandboxed: bool) -> Finding:
    """The finding if the base run or the checkpoint does not exist, or the base run has no checkpoint."""
    run = found["run"]
    if os.path.isabs(from_checkpoint):
        problem = (
            f"The coordinator {host} has no checkpoint {from_checkpoint}, or its service user cannot read "
            "this folder."
        )
        readable = _imported(host, from_checkpoint, found["state_dir"])
        if not sandboxed:
            readable = (
                f"let the service user read it: sudo chmod -R a+rX {from_checkpoint}  (on {host}), then "
                "repeat the command"
            )
        fix = (
            f"if the folder exists, {readable}; else repeat the command with -e from_checkpoint=PATH, the "
            f"path on {host} of a folder step_NNNNNN with a file meta.json"
        )
        return finding("NF432", "from_checkpoint", problem, fix)
    if not found["known"]:
        listed = ", ".join(found["runs"]) or "none"
        problem = f"The coordinator {host} has no run {run}; its newest runs: {listed}."
        instead = f" instead of -e from_checkpoint={from_checkpoint}" if from_checkpoint else ""
        train = f"train the base run first: ansible-playbook train.yml -e run_id={run}"
        newest = next(iter(found["runs"]), "")
        exists = f"repeat the command with one of these, such as -e from_run={newest}{instead}; or "
        fix = exists + train if newest else train
        return finding("NF433", "from_run", problem, fix)
    if not found["checkpoints"]:
        problem = f"The run {run} has no checkpoint on its coordinator {host} yet."
        fix = (
            "wait until the run saves one (every save_minutes, and at its end); to have it now, stop the "
            f"run: ansible-playbook stop.yml -e run_id={run}; if it is not active: ansible-playbook "
            f"train.yml -e run_id={run}"
        )
        return finding("NF434", "from_run", problem, fix)
    listed = ", ".join(os.path.basename(each["path"]) for each in found["checkpoints"])
    problem = f"The run {run} has no checkpoint {from_checkpoint} on {host}. Its checkpoints are {listed}."
    newest = os.path.basename(found["checkpoints"][-1]["path"])
    fix = (
        f"repeat the command with the newest one, -e from_checkpoint={run}/{newest}, or with another one in "
        "this form"
    )
    return finding("NF435", "from_checkpoint", problem, fix)
