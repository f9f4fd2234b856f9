"""The preflight role: every sentence about a setting, an inventory or a host, and the table of them all."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_inventory as preflight
from ansible_collections.nanofleet.fleet.plugins.module_utils import settings_check

from trainer.config import AUTO_IS_0, RunConfig
from trainer.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "preflight"

KNOWN = settings_check.known_names()


def check(asked: dict[str, Any], inventory: dict[str, Any] | None = None) -> list[tuple[str, str, str]]:
    found = settings_check.check(asked, {"tower": inventory or {}})
    return [(f["host"], f["problem"], f["remedy"]) for f in found]


# -- settings


def test_good_knobs_pass_as_text_and_as_numbers() -> None:
    assert check({"depth": "4", "steps": "20", "run_id": "evening-1", "stop_now": "true"}) == []
    assert (
        check({"depth": 4, "total_batch_size": "auto", "network_ufw_enable": True, "ansible_user": "me"})
        == []
    )
    assert check({}, {"depth": 4, "fleet_threads": 2}) == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dept", "depth"),
        ("Depth", "depth"),
        ("step", "steps"),
        ("runid", "run_id"),
        ("network_port_lo", "network_port_low"),
        ("nanofleet_usr", "nanofleet_user"),
        ("bench_stages", "bench_cases"),
        ("batch_size", "device_batch_size"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    assert check({name: "8"}) == [
        (
            f"-e {name}=8",
            f"There is no setting {name}. Did you mean {nearest}?",
            f"repeat the command with -e {nearest}=8 instead of -e {name}=8",
        )
    ]


@pytest.mark.parametrize(
    "name", ["awx_job_id", "awx_user_email", "tower_job_id", "tower_webhook_payload", "ansible_user"]
)
def test_names_that_a_controller_of_jobs_sets_are_admitted(name: str) -> None:
    assert check({name: "7"}) == []


@pytest.mark.parametrize(
    "name", ["runtime_extra", "launch_command", "launch_user", "dataset_dir", "run_config"]
)
def test_a_variable_that_plays_hand_to_roles_is_no_setting(name: str) -> None:
    """With -e, which goes before all else, the tracker's environment would get the trainer's extra."""
    [(where, problem, remedy)] = check({name: "x"})
    assert where == f"-e {name}=x"
    assert problem == f"The playbooks compute the variable {name} themselves, so -e must not set it."
    assert remedy.startswith(f"repeat the command without -e {name}")


def test_the_settings_of_roles_are_those_that_the_sample_inventory_lists() -> None:
    known = settings_check.known_names()
    assert {"network_port_low", "fleet_address", "lab_hosts", "reset_confirm"} <= known.keys()
    assert {"launch_command", "ansible_user", "wait"} & known.keys() == set()


def test_a_name_like_no_other_points_to_the_list() -> None:
    [(where, problem, remedy)] = check({"zzzzzz": "8"})
    assert (where, problem) == ("-e zzzzzz=8", "There is no setting zzzzzz.")
    assert "inventory/sample/group_vars/fleet.yml" in remedy


def test_a_word_without_a_value_is_refused() -> None:
    [(where, problem, remedy)] = check({"_raw_params": "depth 8"})
    assert (where, problem) == ("-e depth", "-e contains depth without =VALUE.")
    assert "-e depth=VALUE" in remedy
    assert "-e 'NAME=\"a b\"'" in remedy  # a word may also be what a blank has cut off a value


@pytest.mark.parametrize(
    ("asked", "sentence", "remedy"),
    [
        ({"depth": "abc"}, "depth is 'abc': it takes a whole number.", "-e depth=8"),
        ({"depth": "0"}, "depth is 0: it must be at least 1.", "-e depth=8"),
        ({"matrix_lr": "fast"}, "matrix_lr is 'fast': it takes a number.", "-e matrix_lr=0.02"),
        ({"steps": "many"}, "steps is 'many': it takes a whole number.", "-e steps=5000"),
        ({"steps": "-1"}, "steps is -1: it takes a whole number of at least 0.", "-e steps=5000"),
        (
            {"tracker_experiment": "d{dept}"},
            "tracker_experiment is 'd{dept}': it takes 1 to 250 letters, digits, blanks inside, "
            "and . _ - : /, and {depth} for the depth.",
            "-e tracker_experiment=nanochat-d{depth}",
        ),
        ({"stop_now": "perhaps"}, "stop_now is 'perhaps': it takes true or false.", "-e stop_now=true"),
        (
            {"tracker_port": "http"},
            "tracker_port is 'http': it takes a whole number.",
            "-e tracker_port=5000",
        ),
        (
            {"run_id": "../x"},
            "run_id is '../x': it takes 1 to 63 letters, digits, dots, dashes and underscores, "
            "and starts with a letter or digit.",
            "-e run_id=evening-1",
        ),
        (
            {"sequence_len": "1000"},
            "total_batch_size is 4096: it must be a multiple of sequence_len (1000); use 4000 or 5000.",
            "-e total_batch_size=4000",
        ),
        (
            {"sync": "local", "local_steps": "1", "local_delay": "1"},
            "local_delay is 1: it must be at least 0 and below local_steps (1); use 0.",
            "-e local_delay=0",
        ),
    ],
)
def test_a_value_that_cannot_be_used_gets_a_sentence(
    asked: dict[str, str], sentence: str, remedy: str
) -> None:
    [(_, problem, typed)] = check(asked)
    assert problem == sentence
    assert typed.startswith("repeat the command with -e ")
    assert typed.partition(" instead of ")[0].endswith(remedy)


def test_a_value_of_the_inventory_is_corrected_there() -> None:
    """An -e would set it for all hosts."""
    [(where, _, typed)] = check({}, {"fleet_address": "me@10.0.0.1"})
    assert where == "inventory fleet_address"
    assert typed.startswith("correct the value of fleet_address (or of ansible_host, if it is not set) in")


def test_two_settings_of_the_length_are_refused() -> None:
    [(where, problem, typed)] = check({"num_iterations": "5000", "target_flops": "1e12"})
    assert where == "-e num_iterations=5000"
    assert problem == (
        "num_iterations is 5000 and target_flops is 1e+12, but only one of them can set the length of the "
        "run. Leave one of them out."
    )
    assert typed == "repeat the command without one of the two, or delete one of them in the inventory"


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    assert check({"preset": "smok"}) == [
        (
            "-e preset=smok",
            f"preset is 'smok': it takes {' or '.join(PRESETS)}.",
            "repeat the command with -e preset=smoke instead of -e preset=smok",
        )
    ]


def test_the_settings_beside_a_preset_are_checked_together_with_it() -> None:
    assert check({"preset": "smoke", "total_batch_size": "512"}, {"sequence_len": 4096}) == []
    assert check({"preset": "smoke", "depth": "6"}, {"depth": "overruled"}) == []
    assert check({"preset": "smoke", "steps": "20"}, {"steps": 500, "target_flops": 1e12}) == []
    [(where, problem, typed)] = check({"preset": "smoke", "sequence_len": "1000"})
    assert where == "-e preset=smoke"
    assert (
        problem == "total_batch_size is 2048: it must be a multiple of sequence_len (1000); use 2000 or 3000."
    )
    assert typed == "repeat the command with -e total_batch_size=2000"


def test_choices_are_listed() -> None:
    spec = {"type": "str", "choices": ["up", "down"]}
    assert (
        settings_check.value_problem("lab_state", "sideways", spec)
        == "lab_state is 'sideways': it takes up or down."
    )
    assert settings_check.value_problem("lab_hosts", "9", {"type": "int", "min": 1, "max": 8}) == (
        "lab_hosts is 9: it takes a whole number from 1 to 8."
    )


def test_templates_are_left_to_where_they_are_used() -> None:
    assert check({"depth": "{{ small }}", "steps": "{{ few }}"}) == []


def test_both_names_of_the_steps_are_refused() -> None:
    [(where, problem, typed)] = check({"steps": "20", "num_iterations": "30"})
    assert (where, typed) == ("-e steps=20", "repeat the command without -e num_iterations=30")
    [(where, _, typed)] = check({"num_iterations": "30"}, {"steps": 20})
    assert (where, typed) == (
        "inventory steps", "repeat the command with -e steps=30 instead of -e num_iterations"
    )  # fmt: skip
    assert problem == "steps and num_iterations are two names of one setting, and both have a value."


def test_all_findings_come_at_once_and_the_inventorys_too() -> None:
    found = check({"dept": "8", "depth": "x", "seed": "y"}, {"matrix_lr": "z", "depth": "overruled"})
    assert [where for where, _, _ in found] == ["-e dept=8", "inventory matrix_lr", "-e depth=x", "-e seed=y"]


def test_every_knob_of_our_own_is_read_by_a_playbook_or_the_wiring() -> None:
    readers = [*(ROOT / "playbooks").rglob("*.yml"), ROOT / "plugins" / "lookup" / "run_settings.py"]
    read = "\n".join(path.read_text() for path in readers)
    own = yaml.safe_load((ROLE / "vars" / "declared_settings.yml").read_text())["preflight_declared_settings"]
    assert [name for name in own if not re.search(rf"\b{name}\b", read)] == []


def test_the_sample_inventory_lists_the_runs_knobs_with_their_defaults() -> None:
    text = (ROOT / "inventory" / "sample" / "group_vars" / "fleet.yml").read_text()
    lines = [line[2:] for line in text.splitlines() if line.startswith("# ") and ": " in line.split("#")[1]]
    sample = yaml.safe_load("\n".join(line for line in lines if line.split(":")[0].isidentifier()))
    sample |= {name: 0 for name in AUTO_IS_0 if sample[name] == "auto"}
    defaults = RunConfig().to_dict()
    assert set(defaults) - {"num_iterations"} <= set(sample)
    assert {name: sample[name] for name in defaults if name in sample} == {
        name: value for name, value in defaults.items() if name in sample
    }
    assert set(sample) <= {*defaults, *KNOWN}


# -- inventory


@pytest.fixture
def _every_name_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "resolved", lambda address: [a for a in [address] if a != "nowhere"])


@pytest.mark.usefixtures("_every_name_resolves")
@pytest.mark.parametrize(
    ("coordinators", "workers", "addresses", "host", "sentence"),
    [
        ([], [], {}, "inventory", "The inventory lists no host in the groups coordinator and workers."),
        ([], ["a"], {}, "inventory", "The group coordinator must hold exactly one host; it holds none."),
        (["a", "b"], [], {}, "inventory", "The group coordinator must hold exactly one host; it holds a, b."),
        (["a"], ["a"], {}, "a", "This host is listed both as coordinator and as worker."),
        (
            ["a"],
            ["b"],
            {"a": "10.0.0.1", "b": "10.0.0.1"},
            "b",
            "This host and a have the same address, 10.0.0.1.",
        ),
        (
            ["a"],
            ["b"],
            {"a": "10.0.0.1", "b": "nowhere"},
            "b",
            "The inventory gives this host the address nowhere, and the controller finds no IP address for "
            "this name.",
        ),
    ],
)
def test_an_inventory_that_is_no_fleet_gets_a_sentence(
    coordinators: list[str], workers: list[str], addresses: dict[str, str], host: str, sentence: str
) -> None:
    [found] = preflight.inventory_findings(addresses, coordinators, workers, [*coordinators, *workers])
    assert (found["host"], found["problem"]) == (host, sentence)
    assert found["remedy"]


@pytest.mark.usefixtures("_every_name_resolves")
@pytest.mark.parametrize(
    ("members", "host", "sentence", "typed"),
    [
        (
            [],
            "inventory",
            "The inventory has no group named fleet, or this group is empty. Every playbook runs on the "
            "hosts of this group.",
            "a group fleet with the children",
        ),
        (
            ["a"],
            "inventory",
            "The group fleet, on which every playbook runs, does not contain b.",
            "children of the group fleet",
        ),
        (
            ["a", "b", "c"],
            "c",
            "This host is in the group fleet, but neither in coordinator nor in workers: no run uses it.",
            "ansible-playbook reset.yml --limit c -e reset_confirm=true",
        ),
    ],
)
def test_a_fleet_that_is_not_its_coordinator_and_workers_is_refused(
    members: list[str], host: str, sentence: str, typed: str
) -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    [found] = preflight.inventory_findings(addresses, ["a"], ["b"], members)
    assert (found["host"], found["problem"]) == (host, sentence)
    assert typed in found["remedy"]


def test_an_empty_inventory_points_to_the_sample() -> None:
    [found] = preflight.inventory_findings({}, [], [], [])
    assert "cp -r inventory/sample" in found["remedy"]


@pytest.mark.usefixtures("_every_name_resolves")
def test_a_fleet_of_one_or_more_passes() -> None:
    assert not list(preflight.inventory_findings({"a": "10.0.0.1"}, ["a"], [], ["a"]))
    two = {"a": "tower.lan", "b": "10.0.0.2"}
    assert not list(preflight.inventory_findings(two, ["a"], ["b"], ["b", "a"]))
    [found] = preflight.inventory_findings(two, ["a"], ["b"], ["b", "a"], as_root=["b"])
    assert (found["code"], found["host"]) == ("NF023", "b")
