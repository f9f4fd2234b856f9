"""What systemd-run starts: the role's templates rendered, and the module's command line of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.nanofleet.fleet.plugins.module_utils import unit_start
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import numbers
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_settings import allowed

from trainer.health.attempt import SIGTERM_WRITE_SECONDS

ROLE = Path(__file__).resolve().parents[2] / "roles" / "launch"
HOSTS = {
    "inventory_hostname": "laptop",
    "launch_hosts": ["tower", "laptop"],
    "launch_addresses": ["10.0.0.1", "10.0.0.2"],
    "launch_plan": {"run_id": "a", "file": {"hosts": ["tower", "laptop"]}},
}
PLACE = {"launch_interface": "eno1", "launch_threads": 4, "launch_nproc_per_node": 2}


def rendered(name: str, **given: Any) -> Any:
    """A variable of the role on the worker laptop, with `given` in the place of its defaults."""
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for folder in ("defaults", "vars"):
        path = str(ROLE / folder / "main.yml")
        variables |= loader.load_from_file(path, trusted_as_template=True)
    return Templar(loader=loader, variables={**variables, **HOSTS, **given}).template(variables[name])


def options(scope: str = "system", **given: Any) -> dict[str, Any]:
    """The options of the module transient_unit for a run."""
    return {
        "name": rendered("__launch_unit"), "description": "", "argv": rendered("__launch_argv", **given),
        "user": "nanofleet", "setenv": rendered("__launch_setenv", **{**PLACE, **given}),
        "properties": rendered("__launch_properties", **given), "scope": scope,
        "boot_condition": rendered("__launch_boot_condition", **{**PLACE, **given}),
    }  # fmt: skip


def command(scope: str = "system", **given: Any) -> list[str]:
    """The systemd-run command of a run."""
    made: list[str] = unit_start.command_line(options(scope, **given))
    return made


def assignments(words: list[str]) -> list[tuple[str, str]]:
    options = [word.removeprefix("--property=") for word in words if word.startswith("--property=")]
    return [(name, value) for name, _, value in (option.partition("=") for option in options)]


def properties(words: list[str]) -> dict[str, str]:
    return dict(assignments(words))


def addresses_of(words: list[str]) -> list[str]:
    return [value for name, value in assignments(words) if name == "IPAddressAllow"]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_dollar_sign_is_in_the_unit(rank: int) -> None:
    """systemd 252 writes one as `\\$` to the unit's file and reads it so at the next daemon-reload."""
    assert not [
        word for word in command(launch_rank=rank, launch_tracker_uri="http://10.0.0.9:5000") if "$" in word
    ]


def test_the_unit_talks_to_its_hosts_and_loopback_alone() -> None:
    words = command(launch_tracker_uri="http://10.0.0.9:5000")
    assert properties(words)["IPAddressDeny"] == "any"
    assert addresses_of(words) == ["localhost", "10.0.0.1", "10.0.0.2"], "a worker does not track"
    tracking = command(launch_rank=0, launch_tracker_uri="http://10.0.0.9:5000")
    assert addresses_of(tracking) == ["localhost", "10.0.0.1", "10.0.0.2", "10.0.0.9"]
    wired = command(launch_allow=["10.0.0.1", "fd42::2"])
    assert addresses_of(wired) == ["localhost", "10.0.0.1", "fd42::2"]


def test_names_become_addresses_and_what_does_not_resolve_is_left_out() -> None:
    assert allowed(["localhost", "name.invalid", ""], "http://[fd42::9]:5000") == ["localhost", "fd42::9"]
    assert allowed(["10.0.0.1"], "sqlite:///mlflow.db") == ["localhost", "10.0.0.1"]


def test_a_list_of_processors_is_expanded() -> None:
    assert (numbers("0-3,6"), numbers("")) == ([0, 1, 2, 3, 6], [])


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


def test_a_rank_may_complete_a_checkpoint_before_it_is_killed() -> None:
    """By systemd, that is; stop_now kills after a grace of its own."""
    unit = properties(command())
    assert unit["KillMode"] == "control-group"
    assert SIGTERM_WRITE_SECONDS + 5 <= int(unit["TimeoutStopSec"]) <= 30


def test_the_journal_knows_the_run() -> None:
    assert properties(command())["LogExtraFields"] == "NANOFLEET_RUN_ID=a"


def test_a_users_own_unit_keeps_what_of_the_sandbox_needs_no_root() -> None:
    """What the role's README says is left: a user's systemd can neither mount nor drop capabilities."""
    whole, own = properties(command()), properties(command("user"))
    assert set(whole) - set(own) == {
        "CapabilityBoundingSet", "IPAddressAllow", "IPAddressDeny", "LogExtraFields", "PrivateDevices",
        "PrivateTmp", "ProtectClock",
        "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules",
        "ProtectKernelTunables", "ProtectSystem", "ReadWritePaths", "User",
    }  # fmt: skip
    sandbox = {
        name: value
        for name, value in own.items()
        if re.match("NoNew|Restrict.*[sxeD]$|Lock|SystemCall", name)
    }
    assert sandbox.keys() >= {
        "NoNewPrivileges", "RestrictAddressFamilies", "RestrictNamespaces", "SystemCallFilter",
        "SystemCallArchitectures",
    }  # fmt: skip
    assert {name: whole[name] for name in own} == own


def test_a_run_writes_to_its_own_directory_alone_and_not_for_the_world() -> None:
    unit = properties(command())
    assert (unit["ProtectSystem"], unit["ReadWritePaths"]) == ("strict", "/var/lib/nanofleet/runs/a")
    assert unit["WorkingDirectory"] == "/var/lib/nanofleet/runs/a"
    assert int(unit["UMask"], 8) & 0o007 == 0o007


def test_the_environment_of_a_command_that_root_runs_is_no_file_of_the_service_user() -> None:
    """LD_PRELOAD or PATH in such a file would be root's as well."""
    words = command()
    assert unit_start.root_commands(options()).keys() == {"ExecStartPost"}, "root runs a command of the unit"
    assert not any(word.startswith("--property=EnvironmentFile=") for word in words)
    given = dict(
        word.removeprefix("--setenv=").split("=", 1) for word in words if word.startswith("--setenv=")
    )
    assert given == {
        "NANOFLEET_HOST": "laptop", "GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "eno1",
        "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "NANOFLEET_STALL_SECONDS": "60",
    }  # fmt: skip


@pytest.mark.parametrize("elastic", [False, True])
def test_ranks_of_an_elastic_run_get_the_path_of_the_secret(elastic: bool) -> None:
    plan = {"run_id": "a", "elastic": elastic, "file": {"hosts": ["tower", "laptop"]}}
    given = rendered("__launch_setenv", **{**PLACE, "launch_plan": plan})
    path = "/opt/nanofleet/fleet.secret"
    assert given.get("NANOFLEET_SECRET_FILE") == (path if elastic else None)
    assert ("NANOFLEET_RANKS" in given) == elastic


@pytest.mark.parametrize(("elastic", "failover"), [(False, False), (True, False), (True, True)])
def test_a_closed_lid_puts_a_host_to_sleep_without_which_the_run_continues(
    elastic: bool, failover: bool
) -> None:
    plan = {"run_id": "a", "elastic": elastic, "failover": failover, "file": {"hosts": ["tower", "laptop"]}}
    for rank, leaves in ((0, failover), (1, elastic)):
        given = {**PLACE, "launch_plan": plan, "launch_rank": rank}
        kinds = rendered("__launch_awake", **given).split()[-1]
        assert ("handle-lid-switch" in kinds) != leaves
        assert kinds.startswith("sleep:idle")


def test_a_host_that_is_added_gets_a_rank_after_those_of_the_run_and_their_addresses() -> None:
    file = {"hosts": ["tower", "attic"], "added_hosts": ["cellar", "laptop"]}
    given = {
        "launch_hosts": ["tower", "attic", "cellar", "laptop"],
        "launch_addresses": ["10.0.0.1", "10.0.0.3", "10.0.0.4", "10.0.0.2"],
        "launch_plan": {"run_id": "a", "elastic": True, "failover": True, "file": file},
        "launch_nproc_per_node": 1,
    }
    ranks = rendered("__launch_ranks", **given).split()
    assert ranks == ["3", "2", "10.0.0.1:20999", "10.0.0.1", "10.0.0.3"]


@pytest.mark.parametrize(
    ("threads", "ranks", "given"),
    [(0, 1, None), (6, 1, "6"), ("6", 2, "3"), (1, 2, "1"), (0, 2, "4"), (0, 16, "1")],
)
def test_the_only_rank_of_a_host_measures_its_threads_unless_they_are_set(
    threads: Any, ranks: int, given: str | None
) -> None:
    words = command(launch_threads=threads, launch_nproc_per_node=ranks, launch_cores=8)
    assert [word for word in words if "OMP_NUM_THREADS" in word] == (
        [f"--setenv=OMP_NUM_THREADS={given}"] if given else []
    )


def test_ranks_share_the_processors_that_their_environment_may_use_unless_some_are_set() -> None:
    installed = {"cores": 6}
    words = command(launch_threads=0, launch_nproc_per_node=2, launch_cores=0, __launch_installed=installed)
    assert "--setenv=OMP_NUM_THREADS=3" in words
    hosts = {"tower": {"launch_cores": 0, "__launch_installed": {"cores": 6}}, "laptop": {"launch_cores": 4}}
    given = {"launch_hosts": list(hosts), "hostvars": hosts}
    assert list(rendered("__launch_all_threads", **given)) == [6, 4]


@pytest.mark.parametrize(("own", "given"), [(0, None), (1, "1"), ("2", "2")])
def test_a_micro_batch_of_its_own_travels_in_the_units_environment(own: Any, given: str | None) -> None:
    words = command(launch_device_batch_size=own)
    batches = [word for word in words if "BATCH" in word]
    assert batches == ([f"--setenv=NANOFLEET_DEVICE_BATCH_SIZE={given}"] if given else [])


def test_rank_0_reads_the_trackers_login_from_a_file_that_root_has_written() -> None:
    """No password in the unit, which systemctl shows, nor in the arguments of systemd-run."""
    login = {"launch_tracker_username": "ada", "launch_tracker_password": "correct horse"}
    worker, first = command(**login), command(**login, launch_rank=0)
    assert not any("EnvironmentFile" in word for word in worker)
    assert "--property=EnvironmentFile=/opt/nanofleet/tracker-login.env" in first
    assert not any("correct horse" in word or "ada" in word for word in first)


def test_rank_0_alone_gets_the_address_of_the_tracker() -> None:
    tracker = {"launch_tracker_uri": "http://127.0.0.1:5000", "launch_tracker_page": "http://tower:5000"}
    assert "MLFLOW_TRACKING_URI" not in rendered("__launch_setenv", **tracker)
    first = rendered("__launch_setenv", **tracker, launch_rank=0)
    assert (first["MLFLOW_TRACKING_URI"], first["NANOFLEET_TRACKER_PAGE"]) == tuple(tracker.values())
    assert "MLFLOW_TRACKING_URI" not in rendered("__launch_setenv", launch_rank=0)


def test_any_host_of_a_run_with_failover_has_what_a_coordinator_needs() -> None:
    hosts = ["tower", "laptop", "attic"]
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    plan = {"run_id": "a", "elastic": True, "failover": True, "file": {"hosts": hosts}}
    given = {"launch_hosts": hosts, "launch_addresses": addresses, "launch_plan": plan}
    tracker = {"launch_tracker_uri": "http://10.0.0.9:5000", "launch_tracker_username": "me"}
    environment = rendered("__launch_setenv", **given, **tracker)
    assert environment["NANOFLEET_RANKS"].split() == ["1", "3", "10.0.0.1:20999", *addresses]
    assert environment["MLFLOW_TRACKING_URI"] == "http://10.0.0.9:5000"
    words = command(**given, **tracker)
    assert "10.0.0.9" in addresses_of(words)
    assert properties(words)["RestartSec"] == "3"
    assert properties(words)["EnvironmentFile"] == "/opt/nanofleet/tracker-login.env"
    without = rendered("__launch_setenv", **{**given, "launch_plan": {**plan, "failover": False}}, **tracker)
    assert without["NANOFLEET_RANKS"].split() == ["1", "3", "10.0.0.1:29500"]
    assert "MLFLOW_TRACKING_URI" not in without
