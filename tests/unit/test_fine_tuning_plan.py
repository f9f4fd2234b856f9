"""What train.yml decides about a run of stage sft, from the checkpoints and runs of the coordinator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import fine_tuning
from ansible_collections.nanofleet.fleet.plugins.module_utils.fine_tuning import FineTuningRefusedError
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import resume_command
from ansible_collections.nanofleet.fleet.plugins.modules import parent_checkpoint
from role_files import call
from run_states import HOSTS, plan, state

from trainer.config import SCHEMA, RunConfig
from trainer.stages import SFT_SETTINGS, parent_of

GIVEN = {"stage": "sft"}
BASE = RunConfig.from_strings({"depth": 3, "sequence_len": 256, "matrix_lr": 0.01, "num_iterations": 40})
RUNS = "/var/lib/nanofleet/runs"


def checkpoint(step: int = 40, run: str = "first", **changes: Any) -> dict[str, Any]:
    meta = {
        "run_id": run,
        "step": step,
        "schema": SCHEMA,
        "config": BASE.to_dict(),
        "sha256": {"model.safetensors": f"{step:064x}"[::-1]},
        "hashes": {"tokenizer": "ab" * 8},
        **changes,
    }
    return {"path": f"{RUNS}/{run}/checkpoints/step_{step:06d}", "meta": meta}


def found(*checkpoints: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {"state_dir": "/var/lib/nanofleet", "run": "first", "known": True, "runs": ["first"], "tuned": []}
    return {**known, "checkpoints": list(checkpoints), **changes}


def tuned(
    of: dict[str, Any], given: dict[str, Any] = GIVEN, run_id: str = "", **changes: Any
) -> dict[str, Any]:
    """A run on the coordinator that `given` has started from a checkpoint."""
    made = fine_tuning.plan("tower", found(of), given, run_id)
    config = RunConfig.from_strings(made["config"])
    return {
        "run_id": run_id or config.default_run_id(),
        "config": config.to_dict(),
        "outcome": None,
        "has_checkpoint": True,
        **changes,
    }


def decided(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return fine_tuning.plan("tower", *args, **kwargs)


def refused(code: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(FineTuningRefusedError) as error:
        decided(*args, **kwargs)
    assert error.value.finding["code"] == code, error.value.finding
    return error.value.finding["problem"]


def test_a_new_run_takes_the_settings_of_the_newest_checkpoint() -> None:
    newest = checkpoint(40)
    made = decided(found(checkpoint(20), newest), {**GIVEN, "eval_every": "5"}, "")
    config = RunConfig.from_strings(made["config"])
    assert (config.depth, config.sequence_len, config.matrix_lr) == (3, 256, 0.01)
    assert {name: getattr(config, name) for name in SFT_SETTINGS} == dict(SFT_SETTINGS)
    assert (config.eval_every, config.parent) == (5, parent_of(newest["meta"]))
    assert made["arguments"] == ["--from-checkpoint", newest["path"]]
    assert config.default_run_id() != BASE.default_run_id()
    assert plan(made["config"], run_id="")["action"] == "start"


def test_a_named_checkpoint_is_taken() -> None:
    made = decided(found(checkpoint(20), checkpoint(40)), GIVEN, "", "first/step_000020")
    assert made["config"]["parent"].startswith("first/step_000020/")
    path = "/srv/imported/step_000007"
    made = decided(found({**checkpoint(7), "path": path}, run=""), GIVEN, "", path)
    assert made["arguments"] == ["--from-checkpoint", path]


def test_settings_of_an_older_release_are_migrated() -> None:
    old = {name: value for name, value in BASE.to_dict().items() if name not in ("stage", "parent")}
    made = decided(found(checkpoint(schema=4, config={**old, "gone": 1})), GIVEN, "")
    assert RunConfig.from_strings(made["config"]).depth == 3


def test_the_same_command_finds_its_run_after_the_base_run_went_on() -> None:
    """Also when the checkpoint that it began with, or all of the base run, has been removed."""
    old, new = checkpoint(40), checkpoint(60)
    run = tuned(old)
    for saved in ([old, new], [new], []):
        made = decided(found(*saved, tuned=[run]), GIVEN, "")
        assert made["run_id"] == run["run_id"]
        assert made["config"] == {"stage": "sft", "parent": parent_of(old["meta"])}
        assert made["arguments"] == (["--from-checkpoint", old["path"]] if old in saved else [])
    stored = state(
        run_id=run["run_id"],
        found=True,
        run_file={"run_id": run["run_id"], "config": run["config"], "hosts": HOSTS},
    )
    again = plan(made["config"], stored, stored, run_id=run["run_id"])
    assert again["action"] == "resume"
    assert again["file"]["config"] == run["config"]


def test_a_finished_run_does_not_keep_a_newer_checkpoint_from_being_fine_tuned() -> None:
    old, new = checkpoint(40), checkpoint(60)
    run = tuned(old, outcome="finished")
    assert decided(found(old, new, tuned=[run]), GIVEN, "")["run_id"] == ""
    assert decided(found(old, tuned=[run]), GIVEN, "")["run_id"] == run["run_id"]


def test_another_setting_is_another_run_unless_the_run_is_named() -> None:
    old = checkpoint(40)
    other = {**GIVEN, "matrix_lr": "0.005"}
    assert decided(found(old, tuned=[tuned(old)]), other, "")["config"]["matrix_lr"] == "0.005"
    named = tuned(old, other, "chat")
    assert decided(found(old, tuned=[named]), GIVEN, "")["run_id"] == ""
    made = decided(found(old, checkpoint(60), tuned=[named]), GIVEN, "chat")
    assert made["run_id"] == "chat"
    assert "matrix_lr" not in made["config"], "the run keeps its own"


def test_what_cannot_start_is_refused_with_a_sentence() -> None:
    one = checkpoint(40)
    assert "has no run first" in refused("NF433", found(known=False, runs=["a"]), GIVEN, "")
    assert "has no checkpoint" in refused("NF434", found(), GIVEN, "")
    assert "step_000040" in refused("NF435", found(one), GIVEN, "", "first/step_000010")
    refused("NF432", found(run="", known=False), GIVEN, "", "/srv/step_000010")
    assert "depth=4 instead of 3" in refused("NF428", found(one), {**GIVEN, "depth": "4"}, "")
    words = "not that of the base run first."
    assert words in refused("NF429", found(one), GIVEN, "", tokenizer_sha256="cd" * 32)
    assert decided(found(one), GIVEN, "", tokenizer_sha256="ab" * 32)["arguments"]
    home = {**one, "path": "/home/me/step_000040"}
    refused("NF430", found(home, run=""), GIVEN, "", home["path"])
    assert decided(found(home, run=""), GIVEN, "", home["path"], sandboxed=False)["arguments"]
    refused("NF426", found(one), {**GIVEN, "matrix_lr": "fast"}, "")
    assert "newer" in refused("NF426", found(checkpoint(schema=SCHEMA + 1)), GIVEN, "")
    assert "damaged" in refused("NF426", found(checkpoint(sha256=None)), GIVEN, "")


def test_a_fix_can_be_typed() -> None:
    """It has one value, in the form of the setting, and not a list."""
    one = checkpoint(40)
    begun = {**tuned(one, run_id="chat"), "has_checkpoint": False}
    for found_there, run_id, asked, typed in (
        (found(known=False, runs=["a", "b"]), "", "", "-e from_run=a; or"),
        (found(known=False, runs=["a"]), "", "first/step_000010", "-e from_run=a instead of -e from_check"),
        (found(known=False, runs=[]), "", "", "ansible-playbook train.yml -e run_id=first"),
        (found(checkpoint(20), one), "", "first/step_000010", "-e from_checkpoint=first/step_000040"),
        (found(tuned=[begun]), "chat", "", f"dest={RUNS}/first/checkpoints/"),
        (found(run="", known=False), "", "/home/me/step_000040/", "-e from_checkpoint=/var/lib/nanofleet/"),
        (found(run="", known=False), "", "/srv/step_000040", "sudo cp -r /srv/step_000040 /var/lib/"),
    ):
        with pytest.raises(FineTuningRefusedError) as error:
            decided(found_there, GIVEN, run_id, asked)
        assert typed in error.value.finding["remedy"]


def test_a_run_whose_settings_cannot_be_read_stops_no_other_one() -> None:
    one = checkpoint(40)
    later = {**tuned(one, run_id="chat"), "config": {"depth": "many"}}
    assert decided(found(one, tuned=[later]), GIVEN, "")["arguments"]
    refused("NF426", found(one, tuned=[later]), GIVEN, "chat")


def test_the_command_that_resumes_a_fine_tuning_is_whole() -> None:
    states = {"tower": {"run_file": {"config": tuned(checkpoint(40))["config"]}}, "laptop": {}}
    assert resume_command("chat", states) == (
        "ansible-playbook train.yml -e run_id=chat -e stage=sft -e from_run=first -e conversations=FILE.jsonl"
    )
    assert resume_command("a", {"tower": {"run_file": {"config": BASE.to_dict()}}}).endswith(" -e run_id=a")


def test_a_run_of_another_base_or_without_any_checkpoint_is_refused() -> None:
    run = tuned(checkpoint(40), run_id="chat")
    other = found(checkpoint(10, "second"), run="second", tuned=[run])
    words = "fine-tunes first/step_000040, but the command names second."
    assert words in refused("NF431", other, GIVEN, "chat")
    rewritten = found(checkpoint(40, sha256={"model.safetensors": "e" * 64}), tuned=[run])
    words = "fine-tunes first/step_000040, which has other content now."
    assert words in refused("NF431", rewritten, GIVEN, "chat", "first/step_000040")
    begun = {**run, "has_checkpoint": False}
    assert "does not have any more" in refused("NF427", found(tuned=[begun]), GIVEN, "chat")


def test_a_run_of_stage_sft_is_not_resumed_as_one_of_stage_base() -> None:
    """It would be given the documents."""
    run = tuned(checkpoint(40), run_id="a")
    stored = state(found=True, run_file={"run_id": "a", "config": run["config"], "hosts": HOSTS})
    made = plan({}, stored, stored)
    assert made["action"] == "refuse"
    assert "-e run_id=a -e stage=sft -e from_run=first" in made["message"]


# -- the module on the coordinator --------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A state folder with a base run of two checkpoints, one of them incomplete, and a run of stage sft."""
    runs = tmp_path / "runs"
    for name, config in (("first", BASE.to_dict()), ("chat", {**BASE.to_dict(), "stage": "sft"})):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text(json.dumps({"run_id": name, "config": config}))
    for step in ("step_000020", "step_000040"):
        (runs / "first" / "checkpoints" / step).mkdir(parents=True)
    meta = checkpoint(20)["meta"]
    (runs / "first" / "checkpoints" / "step_000020" / "meta.json").write_text(json.dumps(meta))
    return tmp_path


def test_the_module_lists_complete_checkpoints_and_runs_of_stage_sft(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = call(parent_checkpoint, monkeypatch, state_dir=str(runs), run="first")
    assert [each["meta"]["step"] for each in read["checkpoints"]] == [20]
    assert [(run["run_id"], run["has_checkpoint"]) for run in read["tuned"]] == [("chat", False)]
    assert read["known"]
    path = read["checkpoints"][0]["path"]
    for asked in ("first/step_000020", path):
        again = call(parent_checkpoint, monkeypatch, state_dir=str(runs), checkpoint=asked)
        assert again["checkpoints"] == read["checkpoints"]
    none = call(parent_checkpoint, monkeypatch, state_dir=str(runs), run="secnd")
    assert (none["known"], none["checkpoints"]) == (False, [])
    assert set(none["runs"]) == {"first", "chat"}
