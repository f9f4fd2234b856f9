"""What systemd-run is told to start: the role's templates rendered, and the module's command line of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from role_files import load

ROLE = Path(__file__).resolve().parents[2] / "roles" / "launch"
HOSTS = {
    "inventory_hostname": "laptop",
    "launch_hosts": ["tower", "laptop"],
    "launch_addresses": ["10.0.0.1", "10.0.0.2"],
    "launch_plan": {"run_id": "a", "file": {"hosts": ["tower", "laptop"]}},
}


load(ROLE / "module_utils" / "nanofleet_unit.py", "ansible.module_utils.nanofleet_unit")
transient_unit = load(ROLE / "library" / "transient_unit.py", "transient_unit")


def rendered(name: str, **given: Any) -> Any:
    """A variable of the role on the worker laptop, with `given` in the place of its defaults."""
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for folder in ("defaults", "vars"):
        path = str(ROLE / folder / "main.yml")
        variables |= loader.load_from_file(path, trusted_as_template=True)
    return Templar(loader=loader, variables={**variables, **HOSTS, **given}).template(variables[name])


def command(scope: str = "system", **given: Any) -> list[str]:
    """The systemd-run command of a run."""
    params = {
        "name": rendered("__launch_unit"), "description": "", "argv": rendered("__launch_argv", **given),
        "user": "nanofleet", "environment_file": "/runs/a/unit.env", "setenv": {}, "collect": False,
        "properties": rendered("__launch_properties", **given), "scope": scope,
    }  # fmt: skip
    made: list[str] = transient_unit.command_line(params)
    return made


def properties(words: list[str]) -> dict[str, str]:
    options = [word.removeprefix("--property=") for word in words if word.startswith("--property=")]
    return dict(option.split("=", 1) for option in options)


def test_torchrun_gets_its_place_its_time_out_and_the_run_alone() -> None:
    words = command(launch_nproc_per_node=2, launch_store_port=29501, launch_join_timeout=30)
    torchrun = words[words.index("torch.distributed.run") : words.index("--module")]
    assert torchrun[1:-2] == [
        "--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29501",
        "--max-restarts=0",
    ]  # fmt: skip
    assert torchrun[-2].startswith("--rdzv-id=a-"), "a host that was away must not meet a run of other hosts"
    assert torchrun[-1] == "--rdzv-conf=timeout=30"
    runs = "/var/lib/nanofleet/runs/a"
    assert words[-6:] == [
        "--run-file", f"{runs}/run.json", "--data-dir", "/var/lib/nanofleet/data", "--run-dir", runs,
    ]  # fmt: skip


def test_a_host_keeps_what_its_owner_wants_of_it() -> None:
    given = properties(command(launch_nice=10, launch_cpus="0-3,6", launch_memory="8G"))
    assert (given["Nice"], given["CPUAffinity"], given["MemoryMax"]) == ("10", "0-3,6", "8G")
    usual = properties(command())
    assert usual["Nice"] == "5"
    assert not {"CPUAffinity", "MemoryMax"} & set(usual), "all that the host has"


def test_the_unit_comes_back_with_a_limit_the_coordinator_first() -> None:
    worker, coordinator = properties(command(launch_attempts=7)), properties(command(launch_rank=0))
    assert worker["Restart"] == "on-failure"
    assert int(worker["RestartSec"]) > int(coordinator["RestartSec"])
    assert worker["ExecCondition"].endswith("-m trainer again --run-dir /var/lib/nanofleet/runs/a --wait "
                                            "--first-must-step --limit 7")  # fmt: skip
    # A wait between two attempts is a minute at most, and counts as part of the start.
    assert int(worker["TimeoutStartSec"]) > 60
    assert int(worker["StartLimitBurst"]) * 10 >= int(worker["StartLimitIntervalSec"]), "ours ends it first"


def test_a_rank_that_ignores_sigterm_is_killed_in_time_for_stop_now() -> None:
    unit = properties(command())
    assert unit["KillMode"] == "control-group"
    assert int(unit["TimeoutStopSec"]) < 15


def test_the_journal_knows_the_run() -> None:
    assert properties(command())["LogExtraFields"] == "NANOFLEET_RUN_ID=a"


@pytest.mark.parametrize("name", ["CapabilityBoundingSet", "ProtectHome", "LogExtraFields", "PrivateTmp"])
def test_a_users_own_unit_is_not_given_what_needs_root(name: str) -> None:
    assert name in properties(command())
    assert name not in properties(command("user"))
    readme = (ROLE / "README.md").read_text()
    assert "A user's systemd can neither mount nor drop capabilities" in readme
