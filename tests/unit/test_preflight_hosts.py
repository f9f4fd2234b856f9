"""The preflight role's findings about hosts: every sentence, from what a probe says on a real host."""

import json
from pathlib import Path
from typing import Any

import pytest
from role_files import load

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "roles" / "preflight" / "filter_plugins"


preflight = load(PLUGINS / "preflight.py")
hosts = load(PLUGINS / "preflight_hosts.py")
run = load(PLUGINS / "preflight_run.py")
use = load(PLUGINS / "preflight_use.py")

LIMITS: dict[str, Any] = {
    "free_gb": 3,
    "skew_s": 5,
    "pythons": ["3.11", "3.12", "3.13"],
    "architectures": ["x86_64", "aarch64"],
}
# As a Debian 12 laptop on its mains says it, sleep.target masked.
GOOD = """kernel=Linux
machine=x86_64
systemd=yes
systemd_version=252
distribution=debian 12
python3=yes
python=3.11
disk=/opt/nanofleet 9000000 /
disk=/var/lib/nanofleet 9000000 /
memory_kb=16000000
available_kb=12000000
limit=
biggest=3355443 4711 ada firefox-esr
cores=4
load=0.31
flags=avx avx2 avx512f avx512_bf16
chassis=10
battery=Charging 63
mains=1
sleep=masked
suspend=masked
HandleLidSwitch=suspend
HandleLidSwitchExternalPower=
IdleAction=ignore
"""
ROOT_OK = """sent=1000
time=1001
uid=0
unit=
run_file=
kept_kb=
vocabulary=
range=20000-20999 0 0
"""


def told(text: str = GOOD, root: str = ROOT_OK, **options: Any) -> list[dict[str, str]]:
    """All findings about a host with this probe text; options: of the filters, and variables of the host."""
    variables = {
        "__preflight_probe": {"stdout": text},
        "__preflight_root": {"stdout": root, "msg": options.pop("msg", "")},
        "ansible_user": "me",
        **options.pop("variables", {}),
    }
    hostvars = {"laptop": variables}
    facts = hosts.facts_of(["laptop"], hostvars)
    asked = {"asked": "config" in options, "config": options.get("config"), "nproc_per_node": 1, **options}
    found = [
        *hosts.host_findings(["laptop"], hostvars, {**LIMITS, **options}),
        *run.run_findings(facts, asked),
        *use.use_findings(facts, {"holds_sleep": True, **options}),
    ]
    assert all(f["host"] == "laptop" for f in found)
    return found


def host(text: str = GOOD, root: str = ROOT_OK, **options: Any) -> list[tuple[str, str]]:
    return [(f["problem"], f["remedy"]) for f in told(text, root, **options)]


def put(text: str, **lines: str) -> str:
    """The probe's text with other values of some keys."""
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in lines]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in lines.items())]) + "\n"


def severity(found: list[dict[str, str]]) -> list[str]:
    return [f["severity"] for f in found]


def test_a_fit_host_has_no_finding() -> None:
    assert host() == []
    assert host(GOOD.replace("\n", "\r\n"), config={"depth": 8}) == []


def test_without_python_it_says_so() -> None:
    [(problem, remedy)] = host(GOOD.replace("python3=yes\npython=3.11\n", ""))
    assert problem == "No python3 is installed; Ansible and the trainer need Python 3.11 or 3.12 or 3.13."
    assert remedy == "sudo apt install python3 python3-venv  (on laptop)"


def test_an_old_python_is_named() -> None:
    [(problem, remedy)] = host(GOOD.replace("3.11", "3.9").replace("debian 12", "debian 11"))
    assert problem == "Python 3.11 or 3.12 or 3.13 is needed; it has 3.9 (debian 11)."
    assert "python3.11" in remedy


@pytest.mark.parametrize(("old", "new"), [("systemd=yes\n", ""), ("kernel=Linux", "kernel=Darwin")])
def test_only_linux_with_systemd_can_run(old: str, new: str) -> None:
    [(problem, remedy)] = host(GOOD.replace(old, new))
    assert "without systemd; runs are systemd units" in problem
    assert "remove laptop from the inventory" in remedy


def test_other_processors_are_refused() -> None:
    [(problem, _)] = host(GOOD.replace("x86_64", "riscv64"))
    assert problem == "Its processor is riscv64; torch is at hand for x86_64 and aarch64."


def test_a_full_disk_is_said_once_a_mount() -> None:
    [(problem, remedy)] = host(GOOD.replace(" 9000000", " 1048576"))
    assert problem == "1.0 GiB are free on / for /opt/nanofleet and /var/lib/nanofleet; 3 are needed."
    assert "du -xh" in remedy
    apart = GOOD.replace("/opt/nanofleet 9000000", "/opt/nanofleet 1048576")
    assert [problem for problem, _ in host(apart)] == [
        "1.0 GiB are free on / for /opt/nanofleet; 3 are needed."
    ]


def test_a_host_that_is_set_up_needs_less_space() -> None:
    two_left = GOOD.replace("9000000", "2097152")
    assert len(host(two_left)) == 1
    assert host(two_left + "installed=yes\n") == []


@pytest.mark.parametrize(("version", "fits"), [("245", False), ("247", True), ("257", True), ("", True)])
def test_a_systemd_that_is_too_old(version: str, fits: bool) -> None:
    found = host(put(GOOD, systemd_version=version, distribution="ubuntu 20.04"))
    assert found == [] if fits else "systemd 245 (ubuntu 20.04) is too old" in found[0][0]


def test_a_missing_command_is_named_with_its_package() -> None:
    assert host(GOOD + "missing=ip\n") == [
        ("The command ip is missing.", "sudo apt install iproute2  (on laptop)")
    ]


@pytest.mark.parametrize(("time", "words"), [(1020, "20 s ahead of"), (980, "20 s behind")])
def test_a_clock_that_is_off(time: int, words: str) -> None:
    [(problem, remedy)] = host(root=put(ROOT_OK, time=str(time)))
    assert problem == f"Its clock is {words} the controller's."
    assert remedy == "sudo timedatectl set-ntp true  (on laptop)"


def test_sudo_that_wants_a_password() -> None:
    [(problem, remedy)] = host(root="", msg="Task failed: Missing sudo password")
    assert problem == "sudo asks for a password of me."
    assert remedy.startswith("add -K")
    [(problem, _)] = host(root="", msg="Incorrect sudo password")
    assert problem == "sudo refuses the password of me."


@pytest.mark.parametrize(
    ("said", "meaning", "remedy"),
    [
        (
            "ssh: connect to host 10.0.0.11 port 22: Connection timed out",
            "down, asleep",
            "ssh -p 2222 me@10.0.0.11",
        ),
        (
            "ssh: connect to host 10.0.0.11 port 22: No route to host",
            "down or on another",
            "ssh -p 2222 me@10.0.0.11",
        ),
        ("ssh: connect: Network is unreachable", "this machine has no route", "ssh -p 2222 me@10.0.0.11"),
        (
            "ssh: connect to host 10.0.0.11 port 22: Connection refused",
            "no SSH server",
            "apt install openssh-server",
        ),
        (
            "me@10.0.0.11: Permission denied (publickey).",
            "refuses this user or key",
            "ssh-copy-id -p 2222 me@10.0.0.11",
        ),
        ("Host key verification failed.", "host key", "ssh -p 2222 me@10.0.0.11"),
        (
            "ssh: Could not resolve hostname laptop: Name or service not known",
            "does not resolve",
            "ansible_host",
        ),
        ("Something else", "Something else", "ssh -p 2222 me@10.0.0.11"),
    ],
)
def test_a_host_that_cannot_be_reached(said: str, meaning: str, remedy: str) -> None:
    variables = {
        "__preflight_probe": {"unreachable": True, "msg": f"Failed to connect to the host via ssh: {said}"},
        "ansible_host": "10.0.0.11",
        "ansible_user": "me",
        "ansible_port": 2222,
    }
    [found] = hosts.host_findings(["laptop"], {"laptop": variables}, LIMITS)
    assert found["problem"].startswith("Cannot be reached at me@10.0.0.11: ")
    assert meaning in found["problem"]
    assert remedy in found["remedy"]


def test_what_is_to_be_typed_takes_the_way_that_ansible_takes() -> None:
    variables = {
        "ansible_host": "10.0.0.11",
        "ansible_ssh_private_key_file": "~/.ssh/home",
        "ansible_ssh_common_args": "-o ProxyJump=gate\n-o IdentitiesOnly=yes",
    }
    words = preflight.ssh_target("laptop", variables)
    assert words["ssh"] == "ssh -o ProxyJump=gate -o IdentitiesOnly=yes -i ~/.ssh/home 10.0.0.11"


# -- what a run takes


def test_a_run_that_fits_has_no_finding() -> None:
    assert host(config={}) == []
    assert host(config={"depth": "8"}) == []


def test_the_checkpoint_follows_the_parameter_count() -> None:
    # spec: 125.8 M parameters and 1.4 GB a checkpoint at depth 8.
    assert run.Need({"depth": 8}).parts["weights"] == pytest.approx(125_829_354 * 4 / 2**30, rel=1e-3)
    assert run.Need({"depth": 8}).checkpoint_gb * 2**30 / 1e9 == pytest.approx(1.41, abs=0.01)


def test_too_little_memory_is_refused_with_the_depth_that_fits() -> None:
    [found] = told(put(GOOD, memory_kb="3000000", available_kb="2900000"), config={"depth": "8"})
    assert found["severity"] == "refusal"
    assert "Depth 8 needs about 4." in found["problem"]
    assert "the copy a checkpoint is written from 1.3" in found["problem"]
    assert "it has 2.9 GiB." in found["problem"]
    depth = int(found["remedy"].rpartition("=")[2])
    assert found["remedy"] == f"the same with -e depth={depth}"
    assert run.Need({"depth": depth}).memory_gb <= 2.9 < run.Need({"depth": depth + 1}).memory_gb


def test_too_little_free_memory_is_a_warning_that_names_the_biggest_process() -> None:
    busy = put(GOOD, available_kb="2097152")
    [found] = told(busy, config={"depth": "8"})
    assert found["severity"] == "warning"
    assert "2.0 of its 15.3 are free: firefox-esr (PID 4711 of ada) has 3.2." in found["problem"]
    # What a run that is up has taken is not somebody else's.
    assert host(busy + "active=nanofleet-d8.service\n", config={"depth": "8"}) == []


def test_memory_counts_every_rank_and_what_the_unit_may_use() -> None:
    assert run.Need({"depth": 8}, ranks=2).memory_gb > 1.6 * run.Need({"depth": 8}).memory_gb
    [(problem, _)] = host(config={"depth": "8"}, nproc_per_node=8)
    assert problem.startswith("8 ranks of depth 8 need about ")
    [(problem, _)] = host(put(GOOD, limit="2G"), config={"depth": "8"})
    assert problem.endswith("; fleet_memory allows 2.0 GiB.")
    assert run.limited_gb("50%", 16.0) == 8.0
    assert run.limited_gb("", 16.0) == 16.0


def test_a_worker_keeps_no_copy_and_a_gpu_no_weights() -> None:
    assert run.Need({"depth": 8}, coordinates=False).copy_gb == 0
    assert run.Need({"depth": 12}, coordinates=False, on_gpu=True).memory_gb < 3


def test_ranks_that_train_by_themselves_have_more_to_keep() -> None:
    """Beside its own weights each has those in common, their momentum and what rounding left over."""
    exact, local = (run.Need({"depth": 8, "sync": sync}, world_size=2) for sync in ("exact", "local"))
    weights = exact.parts["weights"]
    assert local.parts["what ranks have in common"] == pytest.approx(3 * weights)
    assert local.parts["optimizer"] > exact.parts["optimizer"]
    assert local.checkpoint_gb == pytest.approx(exact.checkpoint_gb + weights)
    assert local.own_gb == pytest.approx(2 * weights)
    small = put(GOOD, memory_kb="5000000")
    memory, disk = told(small, config={"depth": "8", "sync": "local"})
    assert "what ranks have in common 1.4" in memory["problem"]
    assert "A checkpoint of depth 8 takes 2.7 GiB" in disk["problem"]


def test_a_run_that_exists_is_measured_by_its_own_configuration() -> None:
    small = put(GOOD, memory_kb="3000000", available_kb="2900000", disk="/var/lib/nanofleet 90000000 /")
    stored = put(ROOT_OK, run_file=json.dumps({"config": {"depth": 4}}))
    assert host(small, stored, config={}) == []
    deep = put(ROOT_OK, run_file=json.dumps({"config": {"depth": 12}}))
    [(problem, remedy)] = host(small, deep, config={})
    assert problem.startswith("Depth 12 needs ")
    assert remedy == "remove laptop from the inventory"  # its depth is settled


def test_room_for_the_checkpoints_of_the_depth() -> None:
    config = {"depth": "8"}  # 1.31 GiB each; keep_checkpoints is 2, so that 4 take 5.3
    four = put(GOOD, disk="/var/lib/nanofleet 4194304 /data")
    [found] = told(four, config=config)
    assert found["severity"] == "warning"
    assert "takes 1.3 GiB and /var/lib/nanofleet has room for 4.0 GiB of them" in found["problem"]
    assert found["remedy"].endswith("-e keep_checkpoints=1")
    assert host(four, put(ROOT_OK, kept_kb="2097152"), config=config) == []
    two = put(GOOD, disk="/var/lib/nanofleet 2500000 /data") + "installed=yes\n"
    assert severity(told(two, config=config)) == ["refusal"]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("avx avx2", True),
        ("avx avx2 avx512f", True),
        ("avx avx2 avx512_bf16", False),
        ("avx2 amx_bf16", False),
    ],
)
def test_bfloat16_where_it_is_emulated(flags: str, refused: bool) -> None:
    found = told(put(GOOD, flags=flags), config={"dtype": "bfloat16"})
    assert severity(found) == (["refusal"] if refused else [])
    assert not refused or f"it has {', '.join(flags.split())} alone" in found[0]["problem"]
    assert host(put(GOOD, flags=flags), config={"dtype": "auto"}) == []
    assert host(put(GOOD, flags=flags, gpu="yes"), config={"dtype": "bfloat16"}) == []


def test_a_processor_without_avx2_is_slow() -> None:
    [found] = told(put(GOOD, flags="avx"), config={})
    assert found["severity"] == "warning"
    assert "no AVX2" in found["problem"]
    assert host(put(GOOD, flags="asimd", machine="aarch64"), config={}) == []


# -- how it is used


def test_other_work_is_named_with_its_owner() -> None:
    busy = put(GOOD, load="7.52") + "busy=398 812 ada ffmpeg\nbusy=99 4711 ada firefox-esr\n"
    [found] = told(busy)
    assert found["severity"] == "warning"
    assert found["problem"] == (
        "Other work keeps it busy, a load of 7.52 on 4 cores: "
        "ffmpeg (398 %, PID 812 of ada), firefox-esr (99 %, PID 4711 of ada)."
    )
    assert found["remedy"] == "sudo renice -n 19 -p 812  (on laptop), or end it"
    assert host(put(GOOD, load="7.52")) == [
        ("Other work keeps it busy, a load of 7.52 on 4 cores.", "top  (on laptop)")
    ]
    assert host(busy + "active=nanofleet-d8-1a2b3c4d.service\n") == []


AWAKE = put(GOOD, sleep="static", suspend="static")


def test_a_lid_that_puts_it_to_sleep() -> None:
    [found] = told(AWAKE)
    assert found["severity"] == "warning"
    assert found["problem"] == (
        "It falls asleep when its lid is closed; a run holds that back while it computes, "
        "but not between two attempts."
    )
    assert found["remedy"].startswith("printf '[Login]\\nHandleLidSwitch=ignore\\n")
    assert "IdleAction" not in found["remedy"]
    [(problem, _)] = host(AWAKE, variables={"ansible_become": False})
    assert problem.endswith("and a run without root cannot hold that back.")
    [(problem, _)] = host(AWAKE, holds_sleep=False)
    assert problem.endswith("and no run holds that back.")


@pytest.mark.parametrize(
    "changed",
    [
        {"HandleLidSwitch": "ignore"},
        {"HandleLidSwitch": "lock"},
        {"HandleLidSwitchExternalPower": "ignore"},  # and it is on its mains
        {"chassis": "3", "battery": ""},  # a desktop
        {"sleep": "masked"},
        {"suspend": "masked"},
    ],
)
def test_what_has_no_lid_or_does_nothing_about_it(changed: dict[str, str]) -> None:
    assert host(put(AWAKE, **changed)) == []


def test_idling_that_puts_a_desktop_to_sleep() -> None:
    desktop = put(AWAKE, chassis="3", battery="")
    [(problem, remedy)] = host(put(desktop, IdleAction="suspend"))
    assert "when nobody uses it for a while" in problem
    assert "IdleAction=ignore" in remedy
    assert "Lid" not in remedy
    [(problem, remedy)] = host(put(desktop, desktop_idle="suspend"))
    assert "when nobody uses it for a while" in problem
    assert remedy.startswith("gsettings set ")


def test_a_laptop_on_its_battery() -> None:
    [found] = told(put(GOOD, battery="Discharging 63", mains="0"))
    assert found["severity"] == "warning"
    assert found["problem"] == "It runs on its battery, 63 % full."
    assert host(put(GOOD, battery="Charging 63", mains="1")) == []


def test_a_port_in_other_hands() -> None:
    squatter = "port=store 29500 2537 root squatter.service /usr/bin/python3 -m http.server 29500\n"
    [found] = told(root=ROOT_OK + squatter)
    assert found["severity"] == "refusal"
    assert found["problem"] == (
        "The store's port 29500 is held by process 2537 of root (/usr/bin/python3 -m http.server 29500), "
        "unit squatter.service."
    )
    assert found["remedy"] == (
        "sudo systemctl stop squatter.service  (on laptop; or take another port: -e store_port=PORT)"
    )
    assert host(root=ROOT_OK + squatter.replace("squatter.service", "nanofleet-d8-1a2b3c4d.service")) == []
    [(_, remedy)] = host(root=ROOT_OK + squatter.replace("squatter.service", "-"))
    assert remedy.startswith("sudo kill 2537")
    [(problem, remedy)] = host(root=ROOT_OK + "port=tracker 5000\n")
    assert problem == "The tracker's port 5000 is held by a process that only root can name."
    assert "-e tracker_port=PORT" in remedy
    assert host(root=ROOT_OK + "port=tracker 5000 - nanofleet nanofleet-tracker.service\n") == []
    [(problem, remedy)] = host(root=ROOT_OK + "port=store 29500 - ada squatter.service\n")
    assert problem == "The store's port 29500 is held by squatter.service of ada."
    assert remedy.startswith("sudo systemctl stop squatter.service")
    [(problem, remedy)] = host(root=ROOT_OK + "port=store 29500 1 root init.scope /sbin/init\n")
    assert "systemd itself" in problem
    assert "kill" not in remedy


def test_a_range_that_is_nearly_used_up() -> None:
    [found] = told(root=put(ROOT_OK, range="20000-20999 940 900 812 ada - ./crawler"))
    assert found["severity"] == "warning"
    assert found["problem"].startswith(
        "940 of the 1000 ports 20000-20999 are taken, 900 of them by process 812 of ada (./crawler)"
    )
    assert host(root=put(ROOT_OK, range="20000-20999 700 700 812 ada - ./crawler")) == []


def test_a_unit_file_of_the_runs_name() -> None:
    path = "/etc/systemd/system/nanofleet-d8.service"
    [found] = told(root=put(ROOT_OK, unit=path))
    assert found["severity"] == "refusal"
    assert f"nanofleet-d8.service is there already, from {path}" in found["problem"]
    assert host(root=put(ROOT_OK, unit="/run/systemd/transient/nanofleet-d8.service")) == []


# -- the table


def test_the_table_holds_every_finding_of_every_host() -> None:
    down = {"__preflight_probe": {"unreachable": True, "msg": "Connection timed out"}}
    old = {
        "__preflight_probe": {"stdout": GOOD.replace("3.11", "3.9")},
        "__preflight_root": {"msg": "Missing sudo"},
    }
    found = hosts.host_findings(["a", "laptop"], {"a": down, "laptop": old}, LIMITS)
    lines = preflight.table(found).splitlines()
    assert lines[0] == "3 findings; nothing was changed."
    assert [line.split("  ")[0] for line in lines[1::2]] == ["a", "laptop", "laptop"]
    assert all(line.strip().startswith("Type: ") for line in lines[2::2])


def test_warnings_follow_what_stops() -> None:
    found = told(put(AWAKE, machine="riscv64"))
    assert preflight.table(found).splitlines()[::2] == [
        "1 finding; nothing was changed.",
        "        Type: remove laptop from the inventory",
        "laptop  It falls asleep when its lid is closed; a run holds that back while it computes, but not "
        "between two attempts.",
    ]
    assert preflight.refusals(found) == found[:1]
    assert preflight.table(found[1:]).startswith("1 warning; nothing stops for it.\n")
