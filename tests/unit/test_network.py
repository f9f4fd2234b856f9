"""The network role: the choice of the interface to the peers, and the findings about it."""

import socket
import threading
from pathlib import Path

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import ip_network
from ansible_collections.nanofleet.fleet.plugins.module_utils import network_interfaces as network
from ansible_collections.nanofleet.fleet.plugins.module_utils import network_reading as links_module

ROLE = Path(__file__).resolve().parents[2] / "roles" / "network"


def link(name: str, *addresses: str, kind: str = "", **flags: bool) -> dict[str, object]:
    info = [
        {
            "family": "inet6" if ":" in a else "inet",
            "local": a.partition("/")[0],
            "prefixlen": int(a.partition("/")[2] or (64 if ":" in a else 24)),
            **flags,
        }
        for a in addresses
    ]
    return {"ifname": name, "addr_info": info, **({"linkinfo": {"info_kind": kind}} if kind else {})}


LINKS = [
    link("lo", "127.0.0.1/8"),
    link("enp3s0", "fd00::10", "10.0.0.10", "fe80::1"),
    link("docker0", "172.17.0.1/16", kind="bridge"),
]
PEERS = {"laptop": "10.0.0.11", "attic": "10.0.0.12"}
ONE = {"laptop": "10.0.0.11"}


def seen(
    *routes: tuple[str, str, str], links: list[dict[str, object]] = LINKS, **more: object
) -> dict[str, object]:
    """What network_links returns; a route is (target, interface, own address)."""
    return {
        "links": links,
        "routes": {t: {"interface": d, "source": s, "error": ""} for t, d, s in routes},
        **more,
    }


def test_the_route_to_the_peers_decides() -> None:
    there = seen(("10.0.0.11", "enp3s0", "10.0.0.10"), ("10.0.0.12", "enp3s0", "10.0.0.10"))
    chosen = network.choose("tower", PEERS, there)
    assert (chosen["interface"], chosen["address"], chosen["listen"]) == ("enp3s0", "10.0.0.10", "10.0.0.10")
    assert chosen["problem"] == ""
    assert chosen["findings"] == []


def test_without_a_preferred_source_the_interfaces_ipv4_address_is_taken() -> None:
    assert network.choose("tower", ONE, seen(("10.0.0.11", "enp3s0", "")))["address"] == "10.0.0.10"


def test_an_override_is_used_and_a_route_over_another_interface_is_a_finding() -> None:
    chosen = network.choose("tower", ONE, seen(("10.0.0.11", "enp3s0", "10.0.0.10")), "docker0")
    assert (chosen["interface"], chosen["address"]) == ("docker0", "172.17.0.1")
    (found,) = chosen["findings"]
    assert (
        "fleet_interface of this host is docker0, but its kernel sends packets to laptop (10.0.0.11) over "
        "enp3s0" in found["problem"]
    )


def test_an_override_takes_the_address_on_the_peers_own_network() -> None:
    links = [link("eth0", "192.168.7.5", "10.0.0.10")]
    chosen = network.choose("tower", ONE, seen(("10.0.0.11", "eth0", "10.0.0.10"), links=links), "eth0")
    assert (chosen["address"], chosen["listen"]) == ("10.0.0.10", "192.168.7.5")


@pytest.mark.parametrize("name", ["wlan0", "lo"])
def test_an_override_that_does_not_exist_or_is_loopback_is_refused_with_what_there_is(name: str) -> None:
    problem = network.choose("tower", {}, seen(), name)["problem"]
    assert f"fleet_interface of tower is {name}, but" in problem
    assert "enp3s0 (10.0.0.10)" in problem
    assert "Set fleet_interface of tower" in problem


def test_loopback_is_never_chosen() -> None:
    by_address = network.choose("tower", {"laptop": "127.0.1.1"}, seen(("127.0.1.1", "lo", "")))
    by_route = network.choose("tower", {"laptop": "10.0.0.10"}, seen(("10.0.0.10", "lo", "")))
    for chosen in (by_address, by_route):
        assert chosen["interface"] == ""
        assert "loopback" in chosen["problem"]
        assert "Set fleet_address of laptop" in chosen["problem"]


def test_a_link_local_peer_is_refused_with_what_to_give_it() -> None:
    problem = network.choose("tower", {"laptop": "fe80::2"}, seen(("fe80::2", "enp3s0", "fe80::1")))[
        "problem"
    ]
    assert "laptop (fe80::2) is link-local" in problem
    assert "Set fleet_address of laptop" in problem
    assert "sudo ip address add" in problem


def test_ipv6_is_as_good_as_ipv4_where_the_interface_has_nothing_else() -> None:
    links = [link("lan6", "fe80::1", "fd42::11")]
    chosen = network.choose(
        "tower", {"laptop": "fd42::12"}, seen(("fd42::12", "lan6", "fd42::11"), links=links)
    )
    assert (chosen["interface"], chosen["address"], chosen["listen"]) == ("lan6", "fd42::11", "fd42::11")
    assert chosen["networks"] == ["fd42::/64"]


def test_gloo_announces_the_first_ipv4_address_even_if_the_route_is_ipv6() -> None:
    chosen = network.choose("tower", {"laptop": "fd00::11"}, seen(("fd00::11", "enp3s0", "fd00::10")))
    assert (chosen["address"], chosen["listen"]) == ("fd00::10", "10.0.0.10")


def test_peers_over_different_interfaces_are_named() -> None:
    there = seen(("10.0.0.11", "enp3s0", "10.0.0.10"), ("10.0.0.12", "docker0", "172.17.0.1"))
    problem = network.choose("tower", PEERS, there)["problem"]
    assert "laptop (10.0.0.11) over enp3s0 but attic (10.0.0.12) over docker0" in problem
    assert "fleet_interface of tower to one of enp3s0 (10.0.0.10), docker0 (172.17.0.1)" in problem


def test_a_peer_without_a_route_is_named_with_the_kernels_words() -> None:
    lost = {"links": LINKS, "routes": {"10.0.0.11": {"error": "RTNETLINK answers: Network is unreachable"}}}
    problem = network.choose("tower", ONE, lost)["problem"]
    assert "tower has no route to laptop (10.0.0.11): RTNETLINK answers: Network is unreachable." in problem
    assert "ip route get 10.0.0.11" in problem


def test_a_lone_host_takes_the_default_route_or_else_any_interface() -> None:
    outside = network.choose("tower", {}, seen(("192.0.2.1", "docker0", "172.17.0.1")))
    assert outside["interface"] == "docker0"
    offline = network.choose("tower", {}, seen(("192.0.2.1", "", "")))
    assert (offline["interface"], offline["address"], offline["problem"]) == ("enp3s0", "10.0.0.10", "")


def test_a_host_without_an_address_is_refused() -> None:
    assert "no network interface" in network.choose("tower", {}, seen(links=[]))["problem"]


@pytest.mark.parametrize(
    ("way", "wireless", "word"),
    [("wlan0", ["wlan0"], "WiFi"), ("tun0", [], "a tunnel"), ("virbr0", [], "a bridge")],
)
def test_an_interface_beside_a_cable_on_the_same_network_is_used_with_a_warning(
    way: str, wireless: list[str], word: str
) -> None:
    links = [link(way, "10.0.0.20"), link("enp3s0", "10.0.0.10")]
    there = seen(("10.0.0.11", way, "10.0.0.20"), links=links, wireless=wireless)
    chosen = network.choose("tower", ONE, there)
    assert chosen["interface"] == way
    (found,) = chosen["findings"]
    assert f"over {way} ({word}" in found["problem"]
    assert "the wired interface enp3s0 is on the same network" in found["problem"]


def test_a_tunnel_that_is_the_only_path_is_no_finding() -> None:
    links = [link("tailscale0", "100.64.0.1/32", kind="tun"), link("enp3s0", "10.0.0.10")]
    there = seen(("100.64.0.2", "tailscale0", "100.64.0.1"), links=links)
    chosen = network.choose("tower", {"laptop": "100.64.0.2"}, there)
    assert (chosen["interface"], chosen["findings"]) == ("tailscale0", [])


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (link("br0", kind="bridge"), "cable"),  # a bridge that a person has made is his LAN
        (link("br-0123456789ab", kind="bridge"), "bridge"),
        (link("home", kind="wireguard"), "tunnel"),
        (link("eth0", kind="veth"), "cable"),
        (link("vethc0ffee", kind="veth"), "bridge"),
    ],
)
def test_kinds_of_interfaces(made: dict[str, object], kind: str) -> None:
    assert network.kind_of(made, []) == kind


def test_a_temporary_address_is_named() -> None:
    links = [link("eth0", "2001:db8::5", temporary=True)]
    there = seen(("2001:db8::6", "eth0", "2001:db8::5"), links=links)
    (found,) = network.choose("tower", {"laptop": "2001:db8::6"}, there)["findings"]
    assert "use_tempaddr=0\\n' default eth0 | sudo tee" in found["remedy"]


def test_a_name_server_that_does_not_answer_is_named() -> None:
    there = seen(("10.0.0.11", "enp3s0", "10.0.0.10"), slow_names=["tower"])
    (found,) = network.choose("tower", ONE, there)["findings"]
    assert "A lookup of the name tower on this host takes more than 3 s" in found["problem"]
    assert "echo 'ADDRESS tower' | sudo tee -a /etc/hosts  (on tower)" in found["remedy"]
    by_address = seen(("10.0.0.11", "enp3s0", "10.0.0.10"), slow_names=["10.0.0.11"])
    (other,) = network.choose("tower", ONE, by_address)["findings"]
    assert "echo '10.0.0.11 laptop' | sudo tee" in other["remedy"]
    assert network.lines([found, found]) == [f"NF204  tower: {found['problem']} Fix: {found['remedy']}"]


def published(address: str, listen: str, networks: list[str]) -> dict[str, object]:
    return {
        "network_interface": "eth0",
        "network_address": address,
        "network_listen_address": listen,
        "network_networks": networks,
    }


@pytest.mark.parametrize(
    ("tower", "laptop", "meet"),
    [
        (("10.0.0.10", "10.0.0.10", ["10.0.0.0/24"]), ("10.0.0.11", "10.0.0.11", ["10.0.0.0/24"]), True),
        (("10.0.0.10", "10.0.0.10", ["10.0.0.0/24"]), ("10.9.0.11", "10.9.0.11", ["10.9.0.0/24"]), True),
        (("fd00::1", "10.0.0.10", ["10.0.0.0/24"]), ("fd00::2", "10.0.0.11", ["10.0.0.0/24"]), True),
        (("fd00::1", "10.0.0.10", ["10.0.0.0/24"]), ("fd00::2", "192.168.7.5", ["192.168.7.0/24"]), False),
        (("fd00::1", "10.0.0.10", ["10.0.0.0/24"]), ("fd00::2", "fd00::2", ["fd00::/64"]), False),
    ],
    ids=["same", "routed", "announced-meet", "announced-do-not-meet", "families-differ"],
)
def test_the_addresses_gloo_announces_must_meet(tower: tuple, laptop: tuple, meet: bool) -> None:
    hostvars = {"tower": published(*tower), "laptop": published(*laptop)}
    findings = network.peer_findings("tower", ["laptop"], hostvars)
    assert (findings == []) is meet
    if not meet:
        shown = f"{tower[1]} of eth0 on tower, and {laptop[1]} of eth0 on laptop"
        assert shown in findings[0]["problem"]


def test_names_are_resolved_to_ipv4_before_loopback_and_link_local(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "tower.lan": ["127.0.1.1", "fd00::10", "10.0.0.10"],
        "six": ["fe80::1%eth0", "fd00::12"],
    }

    def answers(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name == "gone":
            raise OSError
        inet = socket.AF_INET, socket.AF_INET6
        return [(inet[":" in a], 0, 0, "", (a, 0)) for a in known.get(name, [name])]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    resolved = network.resolve({"tower": "tower.lan", "laptop": "10.0.0.11", "six": "six", "attic": "gone"})
    assert resolved == {"tower": "10.0.0.10", "laptop": "10.0.0.11", "six": "fd00::12", "attic": "gone"}


def test_wifi_is_detected_in_sysfs(tmp_path: Path) -> None:
    (tmp_path / "wlp2s0" / "phy80211").mkdir(parents=True)
    (tmp_path / "enp3s0").mkdir()
    assert ip_network.is_wireless("wlp2s0", str(tmp_path))
    assert not ip_network.is_wireless("enp3s0", str(tmp_path))


def test_a_slow_lookup_is_waited_for_until_the_limit() -> None:
    stuck = threading.Event()
    try:
        assert links_module.slow_names({"tower": stuck.wait, "laptop": lambda: None}, 0.05) == ["tower"]
    finally:
        stuck.set()


@pytest.mark.parametrize(
    ("prints", "links"), [("", []), ("no JSON", []), ('[{"ifname": "lo"}]', [{"ifname": "lo"}])]
)
def test_ip_is_read_with_its_error(
    prints: str, links: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ip").write_text(f"#!/bin/sh\necho '{prints}'\necho unreachable >&2\nexit 2\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ip_network.ask_ip("address") == (links, "unreachable")
