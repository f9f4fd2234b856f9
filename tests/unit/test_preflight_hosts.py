"""The preflight role's findings about a host: every sentence, from what a probe says on a real one."""

import re

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import findings
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_hosts as hosts
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_inventory as preflight
from preflight_probe import AWAKE, GOOD, LIMITS, ROOT, ROOT_OK, host, put, reported


def test_a_fit_host_has_no_finding() -> None:
    assert host() == []
    assert host(GOOD.replace("\n", "\r\n"), config={"depth": 8}) == []


def test_without_python_it_reports_it() -> None:
    [(problem, remedy)] = host(GOOD.replace("python3=yes\npython=3.11\n", ""))
    assert problem == (
        "This host has no command python3. Ansible and the training program need Python 3.11 or 3.12 or 3.13."
    )
    assert remedy == "sudo apt install python3 python3-venv  (on laptop)"


def test_an_old_python_is_named() -> None:
    [(problem, remedy)] = host(GOOD.replace("3.11", "3.9").replace("debian 12", "debian 11"))
    assert problem == (
        "The training program needs Python 3.11 or 3.12 or 3.13. On this host (debian 11) the Python of the "
        "setting runtime_python, from which setup.yml makes the environment, is 3.9."
    )
    assert "runtime_python: /usr/bin/python3.11" in remedy
    assert "is none." in host(GOOD.replace("python=3.11\n", ""))[0][0]  # runtime_python names no file


@pytest.mark.parametrize(("old", "new"), [("systemd=yes\n", ""), ("kernel=Linux", "kernel=Darwin")])
def test_only_linux_with_systemd_can_run(old: str, new: str) -> None:
    [(problem, remedy)] = host(GOOD.replace(old, new))
    assert "has no systemd; training runs are systemd units" in problem
    assert "remove laptop from the inventory" in remedy
    assert ("wsl --shutdown" in remedy) == (old == "systemd=yes\n")


@pytest.mark.parametrize(
    ("mount", "folders"), [("/var/lib/nanofleet", "there"), ("/var", "to /var/lib/nanofleet")]
)
def test_a_disk_that_is_mounted_read_only_is_refused(mount: str, folders: str) -> None:
    assert host(GOOD + f"disk=/var/lib/nanofleet 90000000 {mount} rw\n") == []
    [(problem, remedy)] = host(GOOD + f"disk=/var/lib/nanofleet 90000000 {mount} ro\n")
    assert problem == f"The disk at {mount} is mounted read-only, and nanofleet writes {folders}."
    assert remedy.startswith(f"sudo mount -o remount,rw {mount}  (on laptop)")


def test_other_processors_are_refused() -> None:
    [(problem, _)] = host(GOOD.replace("x86_64", "riscv64"))
    assert problem == (
        "The processor of this host is riscv64, and torch is available for x86_64 and aarch64 only."
    )


def test_a_full_disk_is_reported_once_a_mount() -> None:
    [(problem, remedy)] = host(GOOD.replace(" 9000000", " 1048576"))
    assert problem == (
        "The disk at / has 1.0 GiB free, and nanofleet needs 3 GiB for /opt/nanofleet and /var/lib/nanofleet."
    )
    assert "du -xh" in remedy
    apart = GOOD.replace("/opt/nanofleet 9000000", "/opt/nanofleet 1048576")
    assert [problem for problem, _ in host(apart)] == [
        "The disk at / has 1.0 GiB free, and nanofleet needs 3 GiB for /opt/nanofleet."
    ]


def test_a_host_that_is_set_up_needs_less_space() -> None:
    two_left = GOOD.replace("9000000", "2097152")
    assert len(host(two_left)) == 1
    assert host(two_left + "installed=yes\n") == []


@pytest.mark.parametrize(("version", "fits"), [("245", False), ("247", True), ("257", True), ("", True)])
def test_a_systemd_that_is_too_old(version: str, fits: bool) -> None:
    found = host(put(GOOD, systemd_version=version, distribution="ubuntu 20.04"))
    assert found == [] if fits else "systemd 245 of this host (ubuntu 20.04) is too old" in found[0][0]


def test_a_missing_command_is_named_with_its_package() -> None:
    assert host(GOOD + "missing=ip\n") == [
        ("This host has no command ip, which the playbooks use.", "sudo apt install iproute2  (on laptop)")
    ]


def test_the_probe_looks_for_every_command_that_a_host_needs() -> None:
    """rsync receives wheels and data: its absence is reported before anything is changed."""
    probe = (ROOT / "roles" / "preflight" / "templates" / "probe.sh.j2").read_text()
    looked_for = re.search(r"for c in ([\w ]+); do has", probe)
    assert looked_for
    assert looked_for[1].split() == ["ip", "sysctl", "rsync"]
    assert host(GOOD + "missing=rsync\n") == [
        ("This host has no command rsync, which the playbooks use.", "sudo apt install rsync  (on laptop)")
    ]


@pytest.mark.parametrize(("time", "words"), [(1020, "20 s ahead of"), (980, "20 s behind")])
def test_a_clock_that_is_off(time: int, words: str) -> None:
    [(problem, remedy)] = host(root=put(ROOT_OK, time=str(time)))
    assert problem.startswith(f"The clock of this host is {words} that of the controller (allowed: ")
    assert remedy.startswith("sudo timedatectl set-ntp true  (on laptop;")


def test_sudo_that_wants_a_password() -> None:
    [(problem, remedy)] = host(root="", msg="Task failed: Missing sudo password")
    assert problem == "sudo on this host asks for the password of me, and none was given."
    assert remedy.startswith("repeat the command with -K")
    [(problem, remedy)] = host(root="", msg="Incorrect sudo password")
    assert problem == "sudo on this host refuses the password that was given for me."
    assert remedy.startswith("repeat the command with -K")
    assert "if it differs from that on the other hosts, set ansible_become_password of laptop" in remedy
    inventory = {"ansible_become_password": "wrong"}  # Ansible uses it before that of -K
    [(_, remedy)] = host(root="", msg="Incorrect sudo password", variables=inventory)
    assert remedy == "correct ansible_become_password of laptop in the inventory"


def test_a_sudo_that_fails_for_another_reason_gets_another_message() -> None:
    [found] = reported(GOOD, "", msg="Timeout (12s) waiting for privilege escalation prompt: ")
    assert found["code"] == "NF111"
    assert found["problem"] == (
        "sudo on this host does not work for me. Usually it asks for a password, and none was given."
    )
    assert found["remedy"] == (
        "repeat the command with -K (--ask-become-pass), then type the password; if that does not help, see "
        "the error of sudo: sudo true  (on laptop)"
    )
    [(problem, _)] = host(root="sudo: a password is required\n", msg="non-zero return code")
    assert problem == "sudo on this host asks for the password of me, and none was given."


@pytest.mark.parametrize(
    "printed", ["ada is not in the sudoers file.  This incident will be reported.", "sh: 1: sudo: not found"]
)
def test_a_user_without_sudo_is_not_sent_to_the_option_of_passwords_alone(printed: str) -> None:
    [found] = reported(put(GOOD, login="ada"), "", msg=f"Task failed\n{printed}\n")
    assert found["code"] == "NF116"
    assert found["problem"] == f"The user ada cannot use sudo on this host: {printed}"
    assert "adduser ada sudo" in found["remedy"]
    assert "ansible_become: false at laptop" in found["remedy"]


def test_a_shell_that_runs_no_command_is_named() -> None:
    [found] = reported("This account is currently not available.\n", "")
    assert found["code"] == "NF115"
    assert found["remedy"].startswith("type: ssh ")


@pytest.mark.parametrize(
    ("printed", "meaning", "remedy"),
    [
        (
            "ssh: connect to host 10.0.0.11 port 22: Connection timed out",
            "off, asleep",
            "ssh -p 2222 me@10.0.0.11",
        ),
        (
            "ssh: connect to host 10.0.0.11 port 22: No route to host",
            "off or on another",
            "ssh -p 2222 me@10.0.0.11",
        ),
        ("ssh: connect: Network is unreachable", "the controller has no route", "ssh -p 2222 me@10.0.0.11"),
        (
            "ssh: connect to host 10.0.0.11 port 22: Connection refused",
            "no SSH server",
            "apt install openssh-server",
        ),
        (
            "me@10.0.0.11: Permission denied (publickey).",
            "refuses the user or the key",
            "ssh-copy-id -p 2222 me@10.0.0.11",
        ),
        ("Host key verification failed.", "SSH key", "ssh -p 2222 me@10.0.0.11"),
        (
            "ssh: Could not resolve hostname laptop: Name or service not known",
            "no IP address",
            "ansible_host",
        ),
        ("Something else", "Something else", "ssh -p 2222 me@10.0.0.11"),
    ],
)
def test_a_host_that_cannot_be_reached(printed: str, meaning: str, remedy: str) -> None:
    variables = {
        "__preflight_probe": {
            "unreachable": True,
            "msg": f"Failed to connect to the host via ssh: {printed}",
        },
        "ansible_host": "10.0.0.11",
        "ansible_user": "me",
        "ansible_port": 2222,
    }
    [found] = hosts.host_findings(["laptop"], {"laptop": variables}, LIMITS)
    assert found["problem"].startswith("SSH cannot reach this host at me@10.0.0.11: ")
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


# -- the table


def test_the_table_holds_every_finding_of_every_host() -> None:
    down = {"__preflight_probe": {"unreachable": True, "msg": "Connection timed out"}}
    old = {
        "__preflight_probe": {"stdout": GOOD.replace("3.11", "3.9")},
        "__preflight_root": {"msg": "Missing sudo"},
    }
    found = hosts.host_findings(["a", "laptop"], {"a": down, "laptop": old}, LIMITS)
    lines = findings.table(found).splitlines()
    assert lines[0] == "3 findings; nothing was changed."
    assert [line[:13] for line in lines[1::2]] == ["NF101  a     ", "NF107  laptop", "NF111  laptop"]
    assert all(line.strip().startswith("Fix: ") for line in lines[2::2])


def test_warnings_follow_what_stops() -> None:
    found = reported(put(AWAKE, machine="riscv64"))
    assert findings.table(found).splitlines()[::2] == [
        "1 finding; nothing was changed.",
        "               Fix: remove laptop from the inventory",
        "NF121  laptop  This host goes to sleep when its lid is closed. A run keeps it awake while it "
        "trains, but not while it waits to restart after a failure. An elastic run continues without it when "
        "the lid is closed.",
    ]
    assert findings.refusals(found) == found[:1]
    assert findings.table(found).splitlines()[3] == "1 warning."
    assert findings.table(found[1:]).startswith("1 warning; the command continues.\n")
