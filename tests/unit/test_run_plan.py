"""What train.yml decides about a run, from the states of the hosts and the settings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_plan as launch
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_summary as summary
from ansible_collections.nanofleet.fleet.plugins.module_utils import runtime_environments as installed
from run_states import HOSTS, ROLE, ROOT, beat, plan, state, stored

from trainer.code_digest import code_digest
from trainer.config import SCHEMA, RunConfig


def test_a_new_run_holds_every_field_with_its_type() -> None:
    made = plan({"depth": "4", "matrix_lr": "0.01"}, run_id="")
    assert made["action"] == "start"
    assert made["file"]["config"] == RunConfig(depth=4, matrix_lr=0.01).to_dict()
    assert made["run_id"] == RunConfig(depth=4, matrix_lr=0.01).default_run_id()
    assert (made["file"]["hosts"], made["file"]["manifest_sha256"]) == (HOSTS, "m")
    assert made["file"]["trainer_digest"] == code_digest()


@pytest.mark.parametrize(
    ("given", "run_id", "printed"),
    [
        ({"depth": "deep"}, "a", "deep"),
        ({}, "tracker", "reserved"),
        ({}, "eval:first", "reserved"),
        ({}, "../x", "run_id"),
        ({"dept": 1}, "a", "depth"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(given: dict[str, Any], run_id: str, printed: str) -> None:
    made = plan(given, run_id=run_id)
    assert made["action"] == "refuse"
    assert printed in made["message"]


def test_more_ranks_than_sequences_in_a_step_are_refused() -> None:
    made = plan({"total_batch_size": 512, "sequence_len": 512}, run_id="b")
    assert made["action"] == "refuse"
    assert "is 1 sequence(s) of 512 tokens, too few for 2 ranks on tower, laptop" in made["message"]
    assert "-e total_batch_size=1024 or more" in made["message"]
    assert plan({"total_batch_size": 1024, "sequence_len": 512}, run_id="b")["action"] == "start"


def test_an_active_run_is_left_alone() -> None:
    up = state(**stored(), active_units=["nanofleet-a.service"], heartbeats=[beat()], ended=False)
    made = plan({}, up, up)
    assert made["action"] == "none"
    for part in ("active at step 3 of 20 on tower, laptop", "status.yml", "stop.yml -e run_id=a"):
        assert part in made["message"]
    assert made["ends"] == {}
    ending = plan(
        {}, {**up, "stepped": True}, state(**stored(), outcome={"outcome": "finished", "settled": True})
    )
    assert ending["action"] == "none", "laptop is only a little ahead"
    shut_down = {"outcome": "stopped", "settled": False, "reason": "Asked to end by SIGTERM after step 3."}
    assert plan({}, {**up, "stepped": True}, state(**stored(), outcome=shut_down))["action"] == "resume"


def test_a_lost_checkpoint_is_resumed_from_a_copy_if_there_may_be_one() -> None:
    has = state(**stored(), checkpoint="checkpoints/step_000012")
    lost, older = state(**stored()), state(**stored(), checkpoint="checkpoints/step_000003")
    refused = plan({"checkpoint_copies": "1"}, lost, has)
    assert refused["action"] == "refuse"
    assert "on laptop, its former coordinator; tower has none. Repeat the command with" in refused["message"]
    assert "-e checkpoint_copies=2" in refused["message"]
    resumed = plan({}, lost, has)
    assert resumed["action"] == "resume"
    assert "resumes from the checkpoint of step 12 on laptop" in resumed["message"]
    assert "tower has an older one" in plan({}, older, has)["message"]
    assert "laptop" not in plan({}, has, older)["message"]


UNIT = "nanofleet-a.service"


def test_hosts_join_an_active_elastic_run_and_leave_it_unchanged() -> None:
    run_file = stored()["run_file"]
    elastic = {**run_file, "config": {**run_file["config"], "elastic": True}}
    up = state(found=True, run_file=elastic, active_units=[UNIT], heartbeats=[beat()], ended=False)
    away = state(found=True, run_file=elastic)
    made = plan({}, up, away)
    assert (made["action"], made["joins"], made["ends"]) == ("join", ["laptop"], {})
    assert made["file"] == elastic
    assert plan({}, up, up)["action"] == "none"
    worker = {**up, "heartbeats": [{**beat(), "rank": 1}]}
    assert plan({}, away, worker)["action"] == "resume", "without the coordinator nobody trains"
    elected = plan({}, away, up)
    assert (elected["action"], elected["joins"]) == ("join", ["tower"]), "laptop was elected"


def test_no_host_joins_a_run_that_has_made_all_its_steps() -> None:
    """Its last hosts still send their results; a host that joined would wait for the store in vain."""
    run_file = stored()["run_file"]
    elastic = {**run_file, "config": {**run_file["config"], "elastic": True}}
    up = state(found=True, run_file=elastic, active_units=[UNIT], heartbeats=[beat(step=20)], ended=False)
    over = state(found=True, run_file=elastic, outcome={"outcome": "finished", "num_iterations": 20})
    made = plan({}, up, over)
    assert (made["action"], made["joins"]) == ("none", [])
    assert made["message"] == "The run a has made all its steps, and is about to end on tower."
    longer = {**up, "heartbeats": [beat(num_iterations=40)]}
    assert plan({}, longer, over)["action"] == "join", "the run was made longer without this host"


def test_a_host_that_is_new_in_the_inventory_is_added_to_an_active_elastic_run() -> None:
    run_file = stored()["run_file"]
    elastic = {**run_file, "config": {**run_file["config"], "elastic": True}}
    up = state(found=True, run_file=elastic, active_units=[UNIT], heartbeats=[beat()], ended=False)
    new = state()

    def planned(**states: Any) -> dict[str, Any]:
        return launch.plan_run({}, "a", list(states.values()), list(states), "digest")

    made = planned(tower=up, cellar=new, laptop=up)
    assert (made["action"], made["joins"], made["ends"]) == ("join", ["cellar"], {})
    assert made["file"] == {**elastic, "added_hosts": ["cellar"]}
    cellar = {**up, "run_file": made["file"], "heartbeats": []}
    made = planned(attic=new, tower=up, laptop=up, cellar=cellar)
    assert made["joins"] == ["attic"]
    assert made["file"]["added_hosts"] == ["cellar", "attic"], "cellar keeps its rank"
    away = {**cellar, "active_units": [], "ended": True}
    made = planned(tower=up, laptop={**up, "active_units": []}, cellar=away)
    assert made["joins"] == ["laptop", "cellar"]
    assert made["file"]["added_hosts"] == ["cellar"]
    made = planned(tower=up, cellar=new)
    assert made["action"] == "none", "laptop, of the run, is not in the inventory"
    assert "inventory now lists tower, cellar" in made["message"]
    ended = {**up, "active_units": [], "ended": True, "outcome": None}
    made = planned(tower=ended, laptop=ended, cellar={**away, "outcome": None})
    assert (made["action"], made["file"]["hosts"]) == ("resume", ["tower", "laptop", "cellar"])
    assert "added_hosts" not in made["file"]


def test_no_more_hosts_join_than_a_step_has_rows() -> None:
    run_file = stored()["run_file"]
    config = {**run_file["config"], "elastic": True, "total_batch_size": 512, "sequence_len": 256}
    up = state(found=True, run_file={**run_file, "config": config}, active_units=[UNIT], ended=False)
    up["heartbeats"] = [beat()]
    made = launch.plan_run({}, "a", [up, up, state()], ["tower", "laptop", "attic"], "digest")
    assert made["action"] == "none"
    five = {**config, "total_batch_size": 1280}
    up["run_file"] = {**run_file, "config": five}
    for ranks, action in ((1, "join"), (2, "none")):
        ranks_on = dict.fromkeys(("tower", "laptop", "attic"), ranks)
        made = launch.plan_run({}, "a", [up, up, state()], list(ranks_on), "digest", "", ranks_on)
        assert made["action"] == action, f"{ranks} rank(s) on each host"


def test_the_newest_outcome_of_the_hosts_counts() -> None:
    """The first host was lost; the others have finished without it."""
    lost = state(**stored(), outcome={"outcome": "retryable", "time": 10.0})
    done = state(**stored(), outcome={"outcome": "finished", "time": 20.0, "step": 20, "num_iterations": 20})
    assert plan({}, lost, done)["action"] == "none"


def test_three_hosts_of_an_elastic_run_elect_a_coordinator() -> None:
    assert not plan({"elastic": True}, run_id="b")["failover"]
    assert plan({"elastic": True, "coordinator_failover": True}, run_id="b")["failover"]
    three = {"hosts": [*HOSTS, "attic"], "config": {"elastic": True}}
    assert launch.has_failover(three)
    assert not launch.has_failover({**three, "config": {"elastic": True, "coordinator_failover": "false"}})
    newer = {**three["config"], "sync": "turbo", "flux": 3}
    assert launch.has_failover({**three, "config": newer}), "a newer release has written the run file"


def up_on(hosts: list[str], **changes: Any) -> dict[str, Any]:
    run_file = {**stored()["run_file"], "hosts": hosts}
    return state(found=True, run_file=run_file, active_units=[UNIT], ended=False, **changes)


def test_a_run_that_lacks_a_host_is_taken_over() -> None:
    """A reboot took laptop's unit: tower's waits for it until its attempts are used up."""
    waiting = up_on(
        HOSTS, between=True, checkpoint="checkpoints/step_000003", outcome={"outcome": "retryable"}
    )
    made = plan({}, waiting, state(**stored()))
    assert (made["action"], made["ends"]) == ("resume", {"tower": [UNIT]})
    assert "waits on tower for laptop, where its unit is not active" in made["message"]


def test_a_run_whose_directory_is_gone_on_a_worker_is_saved_and_taken_over() -> None:
    """Its unit is active there, or waits to be started again in vain."""
    tower = up_on(HOSTS, stepped=True, heartbeats=[beat()], checkpoint="checkpoints/step_000003")
    laptop = state(run_dir="/runs/a", active_units=[UNIT], ended=False)
    made = plan({}, tower, laptop)
    assert (made["action"], made["ends"]) == ("resume", {"tower": [UNIT], "laptop": [UNIT]})
    assert "its directory is missing on laptop (/runs/a)" in made["message"]
    assert made["saves"], "nothing of what it has learned since its last checkpoint is lost"
    waiting = {**tower, "between": True}
    stuck = plan({}, waiting, {**laptop, "between": True})
    assert (stuck["action"], stuck["saves"]) == ("resume", False), "nobody is there to save"


def test_a_run_whose_directory_is_gone_on_its_coordinator_is_not_ended_unasked() -> None:
    """The memory of its ranks is all that is left of it."""
    made = plan({}, state(active_units=[UNIT], ended=False), up_on(HOSTS, stepped=True))
    assert (made["action"], made["ends"]) == ("refuse", {})
    for part in ("missing on tower, its coordinator (/runs/a)", "stop.yml -e run_id=a -e stop_now=true"):
        assert part in made["message"]


@pytest.mark.parametrize(
    ("result", "exit_status", "unable"),
    [("resources", 0, True), ("exit-code", 226, True), ("exit-code", 75, False), ("exit-code", 255, False)],
)
def test_a_run_whose_unit_systemd_cannot_start_is_taken_over(
    result: str, exit_status: int, unable: bool
) -> None:
    waits = {"result": result, "exit_status": exit_status}
    tower, laptop = up_on(HOSTS, heartbeats=[beat()]), up_on(HOSTS, between=True, unit=waits)
    made = plan({}, tower, laptop)
    assert (made["action"] == "resume") is unable
    assert ("systemd cannot start the unit of the run a on laptop" in made["message"]) is unable


def test_a_run_goes_on_with_other_hosts_once_it_does_not_train() -> None:
    stuck = up_on(["tower", "attic"], between=True, checkpoint="checkpoints/step_000003")
    made = plan({}, stuck, state())
    assert (made["action"], made["ends"], made["file"]["hosts"]) == ("resume", {"tower": [UNIT]}, HOSTS)
    training = up_on(["tower", "attic"], stepped=True, heartbeats=[beat()])
    left = plan({}, training, state())
    assert left["action"] == "none"
    assert "The inventory now lists tower, laptop" in left["message"]
    returned = up_on(HOSTS, between=True)  # its boot entry has started the unit it had before it left
    alone = plan({}, up_on(["tower"], stepped=True, heartbeats=[beat()]), returned)
    assert (alone["action"], alone["ends"]) == ("none", {})
    assert "active at step 3 of 20 on tower; nothing was changed. The inventory now lists" in alone["message"]
    delayed = up_on(["tower", "attic"], stepped=True, heartbeats=[beat(diagnosis="attic does not answer")])
    assert plan({}, delayed, state())["action"] == "resume"


def test_a_unit_of_a_run_that_was_stopped_while_its_host_was_away_is_ended() -> None:
    tower = state(runs=[{"run_id": "b", "active": False, "outcome": "stopped", "settled": True}])
    laptop = state(active_units=["nanofleet-b.service"], runs=[{"run_id": "b", "active": True}])
    made = plan({}, tower, laptop)
    assert (made["action"], made["ends"]) == ("start", {"laptop": ["nanofleet-b.service"]})
    assert "nanofleet-b.service on laptop belongs to a run that has ended on other hosts" in made["message"]
    tower["runs"][0] |= {"outcome": "retryable", "settled": False}
    assert plan({}, tower, laptop)["action"] == "refuse", "that run may come back"


def test_another_run_is_refused_by_name() -> None:
    made = plan({}, state(), state(active_units=["nanofleet-b.service"]))
    assert made["action"] == "refuse"
    assert "laptop is busy with another run, b (unit nanofleet-b.service)" in made["message"]
    assert "stop.yml -e run_id=b" in made["message"]


def test_a_held_port_is_refused_with_pid_and_owner() -> None:
    held = {"port": 29500, "pid": 7, "user": "ann", "command": "nc -l", "unit": ""}
    made = plan({}, state(listeners=[held]), state())
    assert made["action"] == "refuse"
    in_use = "Port 29500 of tower, which the rendezvous store of the run needs, is in use by process 7 of ann"
    assert in_use in made["message"]
    assert "Fix: sudo kill 7  (on tower); or use another port: write store_port: PORT into" in made["message"]
    assert plan({}, state(), state(listeners=[held]))["action"] == "start", (
        "only the coordinator serves the port"
    )


def test_an_unfinished_run_resumes_with_its_own_knobs() -> None:
    made = plan(
        {}, state(**stored(), outcome={"outcome": "stopped"}, checkpoint="checkpoints/step_000003"), state()
    )
    assert made["action"] == "resume"
    assert (made["file"]["config"]["depth"], made["file"]["config"]["num_iterations"]) == (2, 20)


LEFT_TO_LAPTOP = {"host": "laptop", "seconds": 0.04, "together": 5.2, "table": "a table"}


def test_a_run_that_its_ranks_leave_to_one_host_is_planned_for_that_one() -> None:
    made = plan({"sync": "auto"})
    assert made["file"]["chosen_from"] == []
    left = {"outcome": "final", "transfer": LEFT_TO_LAPTOP}
    ends = {"tower": state(outcome={"outcome": "retryable"}), "laptop": state(outcome=left)}
    assert summary.transferred({"tower": state(), "laptop": state()}) == {}
    assert summary.transferred({"tower": state(outcome={"outcome": "final", "transfer": None})}) == {}
    assert summary.transferred(ends) == LEFT_TO_LAPTOP
    there = launch.transfer_plan(made, LEFT_TO_LAPTOP)
    assert (there["file"]["hosts"], there["file"]["chosen_from"]) == (["laptop"], HOSTS)
    assert there["file"]["config"] == made["file"]["config"]
    assert there["ends"] == {"tower": [UNIT], "laptop": [UNIT]}
    assert there["message"] == "a table\nThe run a is transferred to laptop; tower is free."
    assert made["file"]["hosts"] == HOSTS, "the plan that was given stays as it is"


def left_to_laptop(**changes: Any) -> dict[str, Any]:
    run_file = {**stored(sync="auto", elastic="true")["run_file"], "hosts": ["laptop"], "chosen_from": HOSTS}
    return state(found=True, run_file=run_file, **changes)


def test_a_run_that_was_left_to_one_host_stays_there() -> None:
    made = plan({}, state(), left_to_laptop(checkpoint="checkpoints/step_000003"))
    assert made["action"] == "resume", made["message"]
    assert (made["file"]["hosts"], made["file"]["chosen_from"]) == (["laptop"], HOSTS)
    up = left_to_laptop(active_units=[UNIT], heartbeats=[beat()], ended=False, stepped=True)
    active = plan({}, state(), up)
    assert active["action"] == "none"
    assert "active at step 3 of 20 on laptop" in active["message"]
    assert "sync=auto transferred it to that host" in active["message"]
    busy = plan({}, state(active_units=["nanofleet-b.service"]), left_to_laptop())
    assert busy["action"] == "resume", "tower may do something else"
    assert plan({}, state(), left_to_laptop(active_units=["nanofleet-b.service"]))["action"] == "refuse"
    held = {"port": 29500, "pid": 7, "user": "ann", "command": "nc -l", "unit": ""}
    assert "Port 29500 of laptop" in plan({}, state(), left_to_laptop(listeners=[held]))["message"]
    assert plan({}, state(listeners=[held]), left_to_laptop())["action"] == "resume"
    assert "Port 29500 of laptop" in launch.busy(state(listeners=[held]), "laptop", "a")
    assert launch.busy(state(active_units=[UNIT]), "laptop", "a") == ""
    other = plan({}, state(active_units=["nanofleet-b.service"]), state())
    assert other["action"] == "refuse", "a run on all hosts needs tower"
    gone = launch.plan_run({}, "a", [left_to_laptop()], ["tower"], "m")
    assert (gone["file"]["hosts"], gone["file"]["chosen_from"]) == (["tower"], [])


def test_shares_are_those_asked_for_or_of_the_same_hosts_before() -> None:
    def shares(asked: str, before: object, hosts: list[str] = HOSTS) -> object:
        run = stored()
        run["run_file"] |= {"shares": before, "hosts": hosts}
        return launch.plan_run({}, "a", [state(**run), state()], HOSTS, "", asked)["file"]["shares"]

    assert launch.plan_run({}, "a", [state(), state()], HOSTS, "", "auto")["file"]["shares"] == "auto"
    assert shares("", [3, 1]) == [3, 1]
    assert shares("", [3, 1], ["elsewhere", *HOSTS[1:]]) == []
    assert shares("", "auto", ["elsewhere", *HOSTS[1:]]) == "auto"
    assert shares("equal", "auto") == []
    wrong = launch.plan_run({}, "a", [state(), state()], HOSTS, "", "3")
    assert wrong["action"] == "refuse"
    assert wrong["message"] == (
        "shares is 3: 1 number(s), but the run has 2 rank(s) on tower, laptop. Repeat the command with a "
        "number for each rank (its rows of a step), or with -e shares=auto."
    )
    three = launch.plan_run({}, "a", [state(), state()], HOSTS, "", "2,1,1", {"tower": 1, "laptop": 2})
    assert three["file"]["shares"] == [2, 1, 1]
    refused = launch.plan_run({}, "a", [state(), state()], HOSTS, "", "0,4")
    assert (refused["action"], refused["message"][:13]) == ("refuse", "shares is 0,4")


def test_a_finished_run_reports_it_and_another_config_is_shown() -> None:
    done = state(**stored(), outcome={"outcome": "finished", "step": 20, "num_iterations": 20, "loss": 4.25})
    assert plan({}, done, state())["action"] == "none"
    assert "step 20 of 20, loss 4.2500" in plan({}, done, state())["message"]
    assert "To train it further: -e steps=N, more than 20." in plan({}, done, state())["message"]
    other = plan({"seed": "43", "depth": "2", "save_minutes": 5}, done, state())
    assert other["action"] == "refuse"
    assert "another configuration: seed was 42, now 43. To resume it, leave seed out;" in other["message"]


def test_a_longer_run_goes_on_from_its_last_checkpoint_though_it_had_finished() -> None:
    done = state(
        **stored(),
        checkpoint="checkpoints/step_000020",
        outcome={"outcome": "finished", "step": 20, "num_iterations": 20},
    )
    longer = plan({"num_iterations": "30"}, done, state())
    assert (longer["action"], longer["file"]["config"]["num_iterations"]) == ("resume", 30)
    assert "The run is extended from 20 to 30 steps. The learning rates fall after" in longer["message"]
    assert "Step 21 has" in longer["message"]
    assert plan({"num_iterations": "20"}, done, state())["action"] == "none"
    assert plan({"save_minutes": "1"}, done, state())["action"] == "none"
    shorter = plan({"num_iterations": "19"}, state(**stored()), state())
    assert shorter["action"] == "refuse"
    assert "has 20 steps. The command asks for 19 steps, but a run can become longer" in shorter["message"]
    by_target = stored(num_iterations=0, target_flops=1e15)
    finished = {"outcome": "finished", "step": 20, "num_iterations": 20}
    assert plan({"num_iterations": "19"}, state(**by_target, outcome=finished), state())["action"] == "refuse"
    assert plan({"num_iterations": "20"}, state(**by_target, outcome=finished), state())["action"] == "none"
    assert plan({"num_iterations": "21"}, state(**by_target, outcome=finished), state())["action"] == "resume"
    asked = plan({"target_flops": "1e16"}, state(**by_target, outcome=finished), state())
    assert asked["action"] == "resume"
    assert (
        "target_flops was 1000000000000000.0, now 1e+16); the log shows the number of steps."
        in asked["message"]
    )


def test_runtime_settings_may_change_when_a_run_is_resumed() -> None:
    made = plan({"device_batch_size": "1", "save_minutes": "5"}, state(**stored()), state())
    assert made["action"] == "resume"
    config = made["file"]["config"]
    assert (config["device_batch_size"], config["save_minutes"], config["depth"]) == (1, 5.0, 2)
    printed = "Changed settings: device_batch_size was 2, now 1; save_minutes was 30.0, now 5.0."
    assert made["message"] == printed
    up = state(**stored(), active_units=[UNIT], heartbeats=[beat()], ended=False)
    active = plan({"save_minutes": "5", "num_iterations": 30}, up, up)
    assert active["action"] == "none"
    changed = "(num_iterations was 20, now 30; save_minutes was 30.0, now 5.0), stop it, which saves"
    assert changed in active["message"]
    assert "To apply" not in plan({}, up, up)["message"]


def test_a_longer_run_has_the_name_of_the_shorter_one() -> None:
    names = {
        launch.run_name({"depth": "8", **more})
        for more in ({}, {"num_iterations": "6000"}, {"target_flops": "1e15"}, {"save_minutes": "1"})
    }
    assert len(names) == 1
    assert launch.run_name({"depth": "8", "seed": "1"}) not in names


def test_the_run_file_of_another_release_is_migrated_or_refused_by_name() -> None:
    text = (ROOT / "tests/fixtures/checkpoints/schema1/local/run.json").read_text()
    old = json.loads(text)
    host = state(found=True, run_id="local", run_file=old)
    made = plan({}, host, state(), run_id="local")
    assert (made["action"], made["message"]) == ("resume", "")
    config = made["file"]["config"]
    assert config == {
        **RunConfig().to_dict(),
        **old["config"],
        "tracker_experiment": "nanofleet",
        "elastic": "false",
    }
    del old["config"]["local_delay"]
    old["config"]["flux"] = 3
    made = plan({}, host, state(), run_id="local")
    assert (made["action"], made["file"]["config"]["local_delay"]) == ("resume", 1)
    assert made["message"].endswith("they are ignored: flux (3).")
    newer = {"run_id": "local", "schema": SCHEMA + 1, "settings": []}
    refused = plan({}, state(found=True, run_id="local", run_file=newer), state(), run_id="local")
    assert refused["action"] == "refuse"
    assert (
        "The file run.json of the run local on tower was written by a newer nanofleet" in refused["message"]
    )


def test_a_build_of_torch_is_no_skew_and_an_environment_is_compared_within_its_kind() -> None:
    common = {"python": "3.11.2", "machine": "x86_64", "trainer": "d"}
    cpu = {**common, "torch": "2.13.0+cpu", "environment": "a"}
    cuda = {**common, "torch": "2.13.0+cu130", "environment": "b"}
    assert installed.skew({"tower": cpu, "box": cuda}, "d") == ""
    printed = installed.skew({"tower": cpu, "laptop": {**cpu, "environment": "c"}, "box": cuda}, "d")
    assert "environment is a on tower; c on laptop" in printed
    assert "2.12.1" in installed.skew({"tower": cpu, "box": {**cuda, "torch": "2.12.1+cu130"}}, "d")


def test_skew_names_the_odd_host() -> None:
    equal = {"python": "3.11.2", "torch": "2.13.0+cpu", "trainer": "d"}
    assert installed.skew({"tower": equal, "laptop": equal}, "d") == ""
    printed = installed.skew({"tower": equal, "laptop": {**equal, "torch": "2.12.0"}}, "d")
    assert "torch is 2.13.0 on tower; 2.12.0 on laptop" in printed
    assert "setup.yml" in printed
    assert "differs from the folder trainer/" in installed.skew({"tower": equal, "laptop": equal}, "e")


# -- the wiring ------------------------------------------------------------------------------------------


def test_the_log_script_keeps_the_status_and_both_copies(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/bash", str(ROLE / "files" / "unit"), "run", "unit", "/bin/sh", "-c", "echo 'a b'; exit 3"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "a b"
    assert done.stdout.startswith("=== unit started 20")
    assert (tmp_path / "train.log").read_text() == done.stdout
