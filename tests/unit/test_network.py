"""The network role: the interface to the peers, the rules a host needs, and ufw made equal to them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROLE = Path(__file__).resolve().parents[2] / "roles" / "network"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"network_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


network = load(ROLE / "filter_plugins" / "network.py")
firewall = load(ROLE / "library" / "fleet_firewall.py")


def link(name: str, *addresses: str, scope: str = "global") -> dict[str, object]:
    info = [{"family": "inet6" if ":" in a else "inet", "local": a, "scope": scope} for a in addresses]
    return {"ifname": name, "addr_info": info}


LINKS = json.dumps(
    [
        link("lo", "127.0.0.1", scope="host"),
        link("enp3s0", "fd00::10", "10.0.0.10"),
        link("docker0", "172.17.0.1"),
    ]
)


def route(target: str, device: str, source: str = "") -> dict[str, str]:
    entry = {"dst": target, "dev": device, **({"prefsrc": source} if source else {})}
    return {"item": target, "stdout": json.dumps([entry])}


PEERS = {"laptop": "10.0.0.11", "attic": "10.0.0.12"}


def test_the_route_to_the_peers_decides() -> None:
    routes = [route("10.0.0.11", "enp3s0", "10.0.0.10"), route("10.0.0.12", "enp3s0", "10.0.0.10")]
    chosen = network.choose("tower", PEERS, routes, LINKS)
    assert chosen == {"interface": "enp3s0", "address": "10.0.0.10", "problem": ""}


def test_without_a_preferred_source_the_interfaces_ipv4_address_is_taken() -> None:
    chosen = network.choose("tower", {"laptop": "10.0.0.11"}, [route("10.0.0.11", "enp3s0")], LINKS)
    assert chosen["address"] == "10.0.0.10"


def test_an_override_is_respected_whatever_the_routes_say() -> None:
    routes = [route("10.0.0.11", "enp3s0", "10.0.0.10")]
    chosen = network.choose("tower", {"laptop": "10.0.0.11"}, routes, LINKS, "docker0")
    assert (chosen["interface"], chosen["address"]) == ("docker0", "172.17.0.1")


@pytest.mark.parametrize("name", ["wlan0", "lo"])
def test_an_override_that_does_not_exist_or_is_loopback_is_refused_with_what_there_is(name: str) -> None:
    problem = network.choose("tower", {}, [], LINKS, name)["problem"]
    assert f"tower has no interface {name}" in problem
    assert "enp3s0 (10.0.0.10)" in problem
    assert "fleet_interface of tower" in problem


def test_loopback_is_never_chosen() -> None:
    by_address = network.choose("tower", {"laptop": "127.0.1.1"}, [route("127.0.1.1", "lo")], LINKS)
    by_route = network.choose("tower", {"laptop": "10.0.0.10"}, [route("10.0.0.10", "lo")], LINKS)
    for chosen in (by_address, by_route):
        assert chosen["interface"] == ""
        assert "loopback" in chosen["problem"]
        assert "Set fleet_address of laptop" in chosen["problem"]


def test_peers_over_different_interfaces_are_named() -> None:
    routes = [route("10.0.0.11", "enp3s0", "10.0.0.10"), route("10.0.0.12", "docker0", "172.17.0.1")]
    problem = network.choose("tower", PEERS, routes, LINKS)["problem"]
    assert "laptop (10.0.0.11) over enp3s0 but attic (10.0.0.12) over docker0" in problem
    assert "fleet_interface of tower to one of enp3s0 (10.0.0.10), docker0 (172.17.0.1)" in problem


def test_a_peer_without_a_route_is_named_with_the_kernels_words() -> None:
    lost = {"item": "10.0.0.11", "stdout": "", "stderr": "RTNETLINK answers: Network is unreachable"}
    problem = network.choose("tower", {"laptop": "10.0.0.11"}, [lost], LINKS)["problem"]
    assert "tower has no route to laptop (10.0.0.11): RTNETLINK answers: Network is unreachable." in problem
    assert "ip route get 10.0.0.11" in problem


def test_a_lone_host_takes_the_default_route_or_else_any_interface() -> None:
    outside = network.choose("tower", {}, [route("192.0.2.1", "docker0", "172.17.0.1")], LINKS)
    assert outside["interface"] == "docker0"
    offline = network.choose("tower", {}, [{"item": "192.0.2.1", "stdout": ""}], LINKS)
    assert offline == {"interface": "enp3s0", "address": "10.0.0.10", "problem": ""}


def test_a_host_without_any_address_says_so() -> None:
    assert "no network interface" in network.choose("tower", {}, [], "[]")["problem"]


def test_names_are_resolved_to_ipv4_before_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name == "gone":
            raise OSError
        found = ["127.0.1.1", "fd00::10", "10.0.0.10"] if name == "tower.lan" else [name]
        inet = network.socket.AF_INET, network.socket.AF_INET6
        return [(inet[":" in a], 0, 0, "", (a, 0)) for a in found]

    monkeypatch.setattr(network.socket, "getaddrinfo", answers)
    resolved = network.resolve({"tower": "tower.lan", "laptop": "10.0.0.11", "attic": "gone"})
    assert resolved == {"tower": "10.0.0.10", "laptop": "10.0.0.11", "attic": "gone"}


def test_peers_come_from_the_address_they_published() -> None:
    hostvars = {"laptop": {"network_address": "10.9.9.9"}, "attic": {}}
    assert network.sources(PEERS, hostvars) == ["10.9.9.9", "10.0.0.12"]


def test_a_worker_opens_the_range_to_its_peers_alone() -> None:
    wanted = network.rules(["10.0.0.10", "10.0.0.12"], "20000:20999", 29500, 5000, False, "10.0.0.1")
    assert wanted == [{"source": a, "port": "20000:20999"} for a in ("10.0.0.10", "10.0.0.12")]


def test_the_coordinator_also_serves_the_store_and_the_tracker() -> None:
    wanted = network.rules(["10.0.0.11"], "20000:20999", 29500, 5000, True, "10.0.0.1")
    assert [network.rule_line(rule) for rule in wanted] == [
        "port 20000:20999 from 10.0.0.11",
        "port 29500 from 10.0.0.11",
        "port 5000 from 10.0.0.11",
        "port 5000 from 10.0.0.1",
    ]


@pytest.mark.parametrize("controller", ["", "127.0.0.1", "::1", "fe80::1%eth0", "10.0.0.11"])
def test_the_controller_needs_no_rule_if_local_unknown_or_a_peer(controller: str) -> None:
    wanted = network.rules(["10.0.0.11"], "20000:20999", 29500, 5000, True, controller)
    assert {rule["source"] for rule in wanted} == {"10.0.0.11"}


ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow from 10.0.0.11 to any port 20000:20999 proto tcp comment 'nanofleet'
ufw allow from 10.0.0.12 to any port 20000:20999 proto tcp comment 'nanofleet'
ufw allow from 10.0.0.13 to any port 20000:20999 proto tcp
ufw allow from 10.0.0.14 to any port 29500 proto tcp comment 'backup'
ufw deny from 10.0.0.15 to any port 29500 proto tcp comment 'nanofleet'
ufw allow OpenSSH
ufw allow 8080/tcp comment 'it is mine'
"""


def test_allow_rules_are_read_with_their_comments() -> None:
    assert firewall.parse_added(ADDED) == {
        ("10.0.0.11", "20000:20999"): "nanofleet",
        ("10.0.0.12", "20000:20999"): "nanofleet",
        ("10.0.0.13", "20000:20999"): "",
        ("10.0.0.14", "29500"): "backup",
    }
    assert firewall.parse_added("Added user rules (see 'ufw status' for running firewall):\n(None)\n") == {}


def test_only_our_rules_leave_and_other_peoples_rules_are_left_as_they_are() -> None:
    wanted = [("10.0.0.11", "20000:20999"), ("10.0.0.13", "20000:20999"), ("10.0.0.16", "29500")]
    add, delete = firewall.plan(firewall.parse_added(ADDED), wanted, "nanofleet")
    assert add == [("10.0.0.16", "29500")]
    assert delete == [("10.0.0.12", "20000:20999")]


def test_a_second_run_has_nothing_to_do() -> None:
    present = firewall.parse_added(ADDED)
    ours = [rule for rule, comment in present.items() if comment == "nanofleet"]
    assert firewall.plan(present, ours, "nanofleet") == ([], [])
    assert firewall.ours(ADDED, "nanofleet") == [
        "allow from 10.0.0.11 to any port 20000:20999 proto tcp",
        "allow from 10.0.0.12 to any port 20000:20999 proto tcp",
    ]


@pytest.mark.parametrize(
    ("line", "port", "allowed"),
    [
        ("ufw allow OpenSSH", 22, True),
        ("ufw limit 22/tcp comment 'slowly'", 22, True),
        ("ufw allow 2222", 2222, True),
        ("ufw allow OpenSSH", 2222, False),
        ("ufw deny 22/tcp", 22, False),
        ("ufw allow from 10.0.0.9 to any port 22 proto tcp", 22, False),
    ],
)
def test_ssh_is_known_to_be_open_only_if_everybody_may_come(line: str, port: int, allowed: bool) -> None:
    assert firewall.allows_ssh(line + "\n", port) is allowed
