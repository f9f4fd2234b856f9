"""Whether setup.yml has anything to change: read on a host, and compared on the controller."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import host_state, setup_comparison
from ansible_collections.nanofleet.fleet.plugins.module_utils.claim_file import claim_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import folder_digest
from ansible_collections.nanofleet.fleet.plugins.module_utils.host_accounts import described, groups_of
from ansible_collections.nanofleet.fleet.plugins.module_utils.setup_comparison import Fleet, Ports, Wanted
from ansible_collections.nanofleet.fleet.plugins.module_utils.shard_digests import verify
from ansible_collections.nanofleet.fleet.plugins.module_utils.ufw_rules import as_rule

ME = getpass.getuser()
ADDRESSES = {"tower": "10.0.0.1", "laptop": "10.0.0.2"}
DIGEST = "a1" * 32
PORTS = Ports(20000, 20999, 29500, 5000)
LISTENING = {"ports": [{"port": 20000, "role": "gloo", "picked": False}], "held": []}


# -- on a host -----------------------------------------------------------------------------------------------


def test_a_python_that_was_removed_has_no_version(tmp_path: Path) -> None:
    assert host_state.python_version(str(tmp_path / "python")) == ""
    assert host_state.python_version(sys.executable) == "{}.{}".format(*sys.version_info[:2])


def claim(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The options of the claim of a host that is set up."""
    asked = {"path": str(tmp_path / "fleet.json"), "fleet_id": "home", "hosts": ADDRESSES, "by": "", "at": "",
             "controller": "10.0.0.9", "controllers": None}  # fmt: skip
    kept = claim_text({"by": "ada@desk", "at": "then", "fleet_id": "home", "hosts": ADDRESSES}, asked)
    Path(asked["path"]).write_text(kept)
    return {**asked, **changes}


def test_a_claim_is_compared_with_all_that_setup_would_write(tmp_path: Path) -> None:
    asked = claim(tmp_path)
    assert list(host_state.claim_differences(asked, "tower")) == []
    assert host_state.controllers(asked, "tower") == ["10.0.0.9"]
    for change in ({"controller": "10.0.0.8"}, {"hosts": {"tower": "10.0.0.1"}}, {"fleet_id": "den"}):
        assert list(host_state.claim_differences({**asked, **change}, "tower")), change
    Path(asked["path"]).write_text("{")
    [damaged] = host_state.claim_differences(asked, "tower")
    assert "damaged" in damaged
    Path(asked["path"]).unlink()
    assert list(host_state.claim_differences(asked, "tower")) == ["it is not set up"]


def test_an_account_is_compared_if_setup_has_made_it() -> None:
    found = described(ME)
    assert found
    assert list(host_state.account_differences(ME, found, ME)) == []
    changed = {**found, "shell": "/bin/other"}
    assert list(host_state.account_differences(ME, changed, ""))
    assert not list(host_state.account_differences(ME, {**changed, "comment": "another one"}, ""))
    assert list(host_state.account_differences("no-such-user", found, ""))
    assert groups_of(ME)[0]
    assert groups_of("no-such-user") == [""]
    if ME != "nobody":
        [phrase] = host_state.account_differences(ME, found, "nobody")
        assert "not in the group" in phrase


def test_a_folder_with_another_owner_or_mode_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    wanted = {"path": str(tmp_path), "owner": ME, "mode": "0750", "needed": True}
    missing = {**wanted, "path": str(tmp_path / "none")}
    assert list(host_state.folder_differences([wanted, {**missing, "needed": False}])) == []
    assert len(list(host_state.folder_differences([{**wanted, "mode": "0755"}]))) == 1
    assert len(list(host_state.folder_differences([{**wanted, "owner": "nobody2"}, missing]))) == 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with one shard."""
    shard, folder = b"x" * 100, tmp_path / "data"
    for name, content in {"shards/a.parquet": shard, "tokenizer/tokenizer.json": b"{}"}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
    listed = [{"name": "a.parquet", "sha256": hashlib.sha256(shard).hexdigest(), "bytes": 100}]
    manifest = {"schema": 1, "shards": listed, "tokenizer_sha256": hashlib.sha256(b"{}").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, Any]:
    """A made-up environment with one package, and the arguments to read it."""
    venv = tmp_path / "venvs" / DIGEST[:12]
    info = venv / "lib" / "python3.11" / "site-packages" / "alpha-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "alpha.py").write_text("x = 1\n")
    (info / "RECORD").write_text("alpha.py,sha256=0,6\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    marker = {"digest": DIGEST, "installed": host_state.installed_digest(venv), "versions": {"alpha": "1.0"},
              "python": os.path.realpath(sys.executable), "project": ""}  # fmt: skip
    (venv / "nanofleet-venv.json").write_text(json.dumps(marker))
    (tmp_path / "venv").symlink_to(venv)
    return {"link": str(tmp_path / "venv"), "venvs": str(tmp_path / "venvs"), "python": sys.executable}


def test_an_environment_is_complete_until_a_file_changes(environment: dict[str, Any]) -> None:
    good = host_state.environment(**environment)
    assert list(setup_comparison.environment_differences(good, DIGEST, "train")) == []
    assert list(setup_comparison.environment_differences(good, "b" * 64, "train"))
    assert list(setup_comparison.environment_differences({}, DIGEST, "train"))
    assert not host_state.environment(**{**environment, "python": "/usr/bin/other"})["complete"]
    assert not host_state.environment(**{**environment, "venvs": "/elsewhere"})["linked"]
    packages = Path(environment["link"]) / "lib" / "python3.11" / "site-packages"
    (packages / "alpha.py").write_text("x = 1; y = 2\n")
    cut = host_state.environment(**environment)
    assert "as it was installed" in next(setup_comparison.environment_differences(cut, DIGEST, "train"))
    (packages / "alpha.py").write_text("x = 1\n")
    (packages / "alpha-1.0.dist-info" / "RECORD").write_text("alpha.py,sha256=1,6\n")
    assert not host_state.environment(**environment)["complete"]


def test_data_are_compared_with_the_controllers_manifest(data: Path) -> None:
    data.chmod(0o750)
    digest = verify(data, "")["manifest_sha256"]
    assert list(host_state.data_differences(str(data), ME, "0750", digest, False)) == []
    assert list(host_state.data_differences(str(data), ME, "0750", "0" * 64, False))
    assert list(host_state.data_differences(str(data), ME, "0700", digest, False))
    assert list(host_state.data_differences(str(data / "none"), ME, "0750", digest, False))
    (data / "core").mkdir()
    (data / "core" / "core.yaml").write_text("icl_tasks: []\n")
    bundle = folder_digest(data / "core")["sha256"]
    assert list(host_state.data_differences(str(data), ME, "0750", digest, False, bundle)) == []
    (found,) = host_state.data_differences(str(data), ME, "0750", digest, False, "0" * 64)
    assert "CORE bundle" in found
    shard = next((data / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    [phrase] = host_state.data_differences(str(data), ME, "0750", digest, False)
    assert "bytes instead of" in phrase


def test_a_small_file_is_read_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "stamp").write_text("a1a1")
    (tmp_path / "link").symlink_to(tmp_path / "stamp")
    names = ("stamp", "link", "none", ".")
    assert [host_state.stamp_of(str(tmp_path / name)) for name in names] == ["a1a1", "", "", ""]


def test_commands_run_beside_each_other_and_one_may_be_missing() -> None:
    commands = host_state.Commands({"one": ("echo", "1"), "bad": ("false",), "none": ("no-such-program",)})
    assert commands.answer("one") == (0, "1\n")
    assert commands.answer("bad")[0] == 1
    assert commands.answer("none") == (None, "")
    assert host_state.firewall(host_state.Commands({})) == {"status": "absent", "added": ""}
    outputs = host_state.Commands({"added": ("echo", "ufw allow 22"), "status": ("echo", "Status: active")})
    assert host_state.firewall(outputs) == {"status": "active", "added": "ufw allow 22\n"}
    waits = {"added": ("echo", "x"), "status": ("echo", "Status: active"), "timer": ("echo", "active")}
    assert host_state.firewall(host_state.Commands(waits))["status"] == "inactive", "a timer will disable it"
    failed = host_state.Commands({"added": ("echo", "x"), "status": ("false",)})
    assert host_state.firewall(failed)["status"] == "error"


# -- on the controller ---------------------------------------------------------------------------------------


def link(address: str) -> dict[str, Any]:
    found = {"family": "inet", "local": address, "prefixlen": 24, "scope": "global"}
    return {"ifname": "eth0", "addr_info": [found]}


def state(host: str) -> dict[str, Any]:
    """The state of a host that is set up."""
    own = ADDRESSES[host]
    [peer] = [name for name in ADDRESSES if name != host]
    route = {"interface": "eth0", "source": own, "error": ""}
    sources = [(ADDRESSES[peer], "20000:20999")]
    if host == "tower":
        sources += [(ADDRESSES[peer], "29500"), (ADDRESSES[peer], "5000"), ("10.0.0.9", "5000")]
    installed = {"linked": True, "name": DIGEST[:12], "complete": True, "digest": DIGEST,
                 "installed": "f" * 64, "versions": {"torch": "2.13.0+cpu"}, "project": "e" * 64}  # fmt: skip
    open_port = {**LISTENING["ports"][0], "state": "open", "detail": "", "seen": own}
    tried = {"ports": [open_port], "rtt_ms": None, "mtu": None, "up": True, "route": route}
    return {
        "differences": [],
        "network": {"links": [link(own)], "routes": {ADDRESSES[peer]: route}, "wireless": [],
                    "slow_names": [], "peers": {peer: ADDRESSES[peer]}, "override": ""},
        "address": own,
        "controllers": ["10.0.0.9"] if host == "tower" else [],
        "ports": {"changed": False, "before": "32768 60999", "usable": 1000, "reserved": "", "overriding": [],
                  "listeners": []},
        "secret": "5e" * 32, "python": "3.11", "machine": "x86_64",
        "environments": {"train": installed, "tracker": {**installed, "project": ""}},
        "firewall": {"status": "active", "added": "".join(
            f"ufw {as_rule(*each)} comment 'nanofleet home'\n" for each in sources)},
        "filter": "closed",
        "listening": LISTENING,
        "tried": {"peers": {peer: tried}},
    }  # fmt: skip


def fleet(change: Any = None, **wanted: Any) -> Fleet:
    """A fleet of two; change: called with the states before they are compared."""
    states = {host: state(host) for host in ADDRESSES}
    if change:
        change(states)
    given: dict[str, Any] = {
        "coordinator": "tower", "ports": PORTS, "comment": "nanofleet home", "enable": False, "tracker": [],
        "torch": dict.fromkeys(ADDRESSES, ("cpu", "")), "connections": {"tower": "10.0.0.9 5 10.0.0.1 2222"},
        "digests": {name: {"3.11-x86_64": DIGEST} for name in ("train", "tracker")},
    }  # fmt: skip
    return Fleet(states, Wanted(**{**given, **wanted}))


def test_a_fleet_that_is_set_up_differs_in_nothing() -> None:
    found = fleet()
    assert found.differences() == []
    assert found.fleet_addresses() == ["10.0.0.1", "10.0.0.2"]
    report = found.report()
    assert len(report) == 2
    assert report[0].startswith("The same on all hosts: torch 2.13.0, the trainer eeeeeeeeeeee")


def rule_is_gone(states: Any) -> None:
    _first, *rest = states["laptop"]["firewall"]["added"].splitlines(keepends=True)
    states["laptop"]["firewall"]["added"] = "".join(rest)


def rule_is_old(states: Any) -> None:
    states["tower"]["firewall"]["added"] += (
        "ufw allow from 10.0.0.7 to any port 29500 comment 'nanofleet home'\n"
    )


def path_is_closed(states: Any) -> None:
    states["tower"]["tried"]["peers"]["laptop"]["ports"][0]["state"] = "filtered"


def probe_failed(states: Any) -> None:
    states["tower"]["tried"] = {"failed": True}


def another_file(states: Any) -> None:
    states["laptop"]["environments"]["train"]["installed"] = "0" * 64


def broken(states: Any) -> None:
    states["laptop"]["environments"]["train"]["complete"] = False


def another_secret(states: Any) -> None:
    states["laptop"]["secret"] = "0" * 64


def no_route(states: Any) -> None:
    states["laptop"]["network"]["routes"]["10.0.0.1"] = {
        "interface": "",
        "source": "",
        "error": "unreachable",
    }


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (rule_is_gone, "laptop: the ufw rule 'allow from 10.0.0.1 to any port 20000:20999"),
        (rule_is_old, "tower: the ufw rule 'allow from 10.0.0.7 to any port 29500' is not of this fleet"),
        (path_is_closed, "a connection between the hosts failed"),
        (probe_failed, "tower: a connection between the hosts failed"),
        (another_file, "The installed packages of this host"),
        (broken, "laptop: its environment (train) is not as it was installed"),
        (no_route, "laptop: no interface reaches all peers"),
        (another_secret, "laptop: its secret is not the coordinator's"),
    ],
)  # fmt: skip
def test_what_is_not_as_wanted_is_named(change: Any, phrase: str) -> None:
    found = fleet(change).differences()
    assert any(phrase in each for each in found), found


def test_other_wishes_are_differences() -> None:
    assert (
        "laptop: its environment (train) is not the one of this checkout" in fleet(digests={}).differences()
    )
    assert "tower: it does not answer" in fleet(tracker=["it does not answer"]).differences()
    assert fleet(ports=Ports(20000, 20050, 29500, 5000)).differences()
    assert not Ports(20000, 20999, 20500, 5000).valid
    assert fleet(comment="nanofleet den").differences()

    def idle(states: Any) -> None:
        for each in states.values():
            each["firewall"]["status"] = "inactive"

    assert fleet(idle).differences() == []
    assert "To enable it" in " ".join(fleet(idle).report())
    assert "tower: ufw is not enabled" in fleet(idle, enable=True).differences()


def test_a_host_that_was_not_read_is_a_difference() -> None:
    def lost(states: Any) -> None:
        states["laptop"] = {"differences": ["it is not set up"]}

    found = fleet(lost)
    assert not found.read
    assert found.differences() == ["laptop: it is not set up"]
    assert fleet(lambda states: states.update(laptop={})).differences() == [
        "laptop: its state could not be read"
    ]


def test_a_tracker_is_compared_with_its_unit_login_and_database() -> None:
    wanted = {"unit": "[Unit]\n", "user": "nanofleet", "environment": DIGEST[:12], "login": ""}
    good = {"unit": "[Unit]", "unit_mode": "0644", "folder": {"owner": "nanofleet", "mode": "0750"},
            "stamp": DIGEST[:12], "login": "", "login_mode": "", "enabled": True, "active": True,
            "answers": True}  # fmt: skip
    assert setup_comparison.tracker_differences(good, wanted) == []
    for name, value in {"unit": "[Unit]\nx", "unit_mode": "0666", "folder": None, "stamp": "", "login": "0",
                        "enabled": False, "active": False, "answers": False}.items():  # fmt: skip
        assert len(setup_comparison.tracker_differences({**good, name: value}, wanted)) == 1, name
    assert setup_comparison.tracker_differences(good, {**wanted, "login": "x"})
