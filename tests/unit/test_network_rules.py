"""The network role's rules: ufw made equal to them, SSH kept open, the port range, connections tried."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import network_rules as rules
from ansible_collections.nanofleet.fleet.plugins.module_utils import port_range as ports
from ansible_collections.nanofleet.fleet.plugins.module_utils import ufw_rules as firewall
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import make_rule
from port_range import COLON, DASHED, HIGH, LOW

ROLE = Path(__file__).resolve().parents[2] / "roles" / "network"


PEERS = {"laptop": "10.0.0.11", "attic": "10.0.0.12"}


# The wanted rules


def test_peers_come_from_the_addresses_they_published() -> None:
    hostvars = {
        "laptop": {"network_address": "10.9.9.9", "network_listen_address": "10.9.9.9"},
        "attic": {"network_address": "fd00:0::5", "network_listen_address": "10.0.0.5"},
        "shed": {},
    }
    peers = {**PEERS, "shed": "10.0.0.13"}
    assert rules.sources(peers, hostvars) == ["10.9.9.9", "fd00::5", "10.0.0.5", "10.0.0.13"]


def test_a_worker_opens_the_range_to_its_peers_alone() -> None:
    wanted = rules.rules(["10.0.0.10", "10.0.0.12"], COLON, 29500, 5000, False, ["10.0.0.1"])
    assert wanted == [{"source": a, "port": COLON} for a in ("10.0.0.10", "10.0.0.12")]


def test_the_coordinator_also_serves_the_store_and_the_tracker() -> None:
    wanted = rules.rules(["10.0.0.11"], COLON, 29500, 5000, True, ["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    assert [f"port {rule['port']} from {rule['source']}" for rule in wanted] == [
        f"port {COLON} from 10.0.0.11",
        "port 29500 from 10.0.0.11",
        "port 5000 from 10.0.0.11",
        "port 5000 from 10.0.0.1",
        "port 5000 from 10.0.0.2",
    ]


@pytest.mark.parametrize("controller", ["", "127.0.0.1", "::1", "fe80::1%eth0", "10.0.0.11"])
def test_the_controller_needs_no_rule_if_local_unknown_or_a_peer(controller: str) -> None:
    wanted = rules.rules(["10.0.0.11"], COLON, 29500, 5000, True, [controller])
    assert {rule["source"] for rule in wanted} == {"10.0.0.11"}


# ufw

ADDED = f"""Added user rules (see 'ufw status' for running firewall):
ufw allow from 10.0.0.11 to any port {COLON} proto tcp comment 'nanofleet'
ufw allow from 10.0.0.12 to any port {COLON} proto tcp comment 'nanofleet'
ufw allow from 10.0.0.13 to any port {COLON} proto tcp
ufw allow from 10.0.0.14 to any port 29500 proto tcp comment 'backup'
ufw deny from 10.0.0.15 to any port 29500 proto tcp comment 'of the attic'
ufw allow OpenSSH
ufw allow 8080/tcp comment 'it is mine'
ufw allow 22/tcp comment 'nanofleet ssh'
"""


def test_rules_are_read_with_their_comments() -> None:
    added = firewall.parse_added(ADDED)
    assert added[f"allow from 10.0.0.11 to any port {COLON} proto tcp"] == "nanofleet"
    assert added[f"allow from 10.0.0.13 to any port {COLON} proto tcp"] == ""
    assert added["allow 8080/tcp"] == "it is mine"
    assert len(added) == 8
    assert firewall.parse_added("Added user rules (see 'ufw status' for running firewall):\n(None)\n") == {}


def test_only_rules_of_the_fleet_are_deleted() -> None:
    wanted = [
        firewall.as_rule(source, port)
        for source, port in (
            ("10.0.0.11", COLON),
            ("10.0.0.13", COLON),
            ("10.0.0.16", "29500"),
        )
    ]
    add, delete = firewall.plan(firewall.parse_added(ADDED), wanted, "nanofleet")
    assert add == ["allow from 10.0.0.16 to any port 29500 proto tcp"]
    assert delete == [f"allow from 10.0.0.12 to any port {COLON} proto tcp"]


def test_rules_get_the_name_of_the_fleet_and_those_of_another_name_are_ours_as_well() -> None:
    present = {"allow from 10.0.0.11 to any port 29500 proto tcp": "nanofleet",
               "allow from 10.0.0.12 to any port 29500 proto tcp": "nanofleet attic",
               "allow from 10.0.0.13 to any port 29500 proto tcp": "nanofleets of a person",
               "allow 22/tcp": "nanofleet attic ssh"}  # fmt: skip
    wanted = list(present)[:1]
    add, delete = firewall.plan(present, wanted, "nanofleet home")
    assert add == wanted, "its comment is changed"
    assert delete == ["allow from 10.0.0.12 to any port 29500 proto tcp"]


@pytest.mark.parametrize(("answer", "warns"), [("closed", False), ("open", True), ("", True), ("user", True)])
def test_a_host_that_cannot_filter_addresses_gets_a_warning(answer: str, warns: bool) -> None:
    found = rules.filter_findings("tower", answer)
    assert [finding["host"] for finding in found] == ["tower"] * warns
    assert all("only a firewall keeps other machines" in finding["problem"] for finding in found)
    by_person = answer == "user"  # setup.yml changes no firewall there
    assert all(("network_ufw_enable" not in finding["remedy"]) is by_person for finding in found)
    assert all(("sudo ufw allow 22/tcp" in finding["remedy"]) is by_person for finding in found)


def test_a_second_run_has_nothing_to_do_and_keeps_the_rule_for_ssh() -> None:
    present = firewall.parse_added(ADDED)
    ours = [rule for rule, comment in present.items() if comment == "nanofleet"]
    assert firewall.plan(present, ours, "nanofleet") == ([], [])


@pytest.mark.parametrize(
    ("source", "written"),
    [("fd42:0:0::12", "fd42::12"), ("10.0.0.11", "10.0.0.11"), ("10.0.0.0/24", "10.0.0.0/24")],
)
def test_addresses_are_written_as_ufw_writes_them(source: str, written: str) -> None:
    assert firewall.as_rule(source, "29500") == f"allow from {written} to any port 29500 proto tcp"


@pytest.mark.parametrize(
    ("lines", "port", "verdict"),
    [
        (["allow OpenSSH"], 22, "accept"),
        (["limit 22/tcp"], 22, "accept"),
        (["allow 2222"], 2222, "accept"),
        (["allow 80,2000:3000/tcp"], 2222, "accept"),
        (["allow OpenSSH"], 2222, ""),
        (["allow 22/udp"], 22, ""),
        (["deny 22/tcp", "allow OpenSSH"], 22, "drop"),
        (["allow from 10.0.0.0/24 to any port 22 proto tcp"], 22, "accept"),
        (["allow from 10.0.0.0/24 to any app OpenSSH"], 22, "accept"),
        (["allow from 10.0.1.0/24 to any port 22 proto tcp"], 22, ""),
        (["allow from 10.0.0.9"], 22, "accept"),
        (["reject from 10.0.0.0/8", "allow OpenSSH"], 22, "drop"),
        (["allow in on wlan0 to any port 22"], 22, ""),
        (["deny in on wlan0 to any port 22"], 22, "drop"),
        (["allow to 10.0.0.10 port 22"], 22, ""),
        (["deny out 22", "allow log 22/tcp"], 22, "accept"),
        (["route allow in on eth0 out on eth1"], 22, ""),
        (["allow 'Nginx Full'"], 22, ""),
    ],
)
def test_the_first_rule_about_the_controllers_ssh_decides(lines: list[str], port: int, verdict: str) -> None:
    assert firewall.ssh_verdict(lines, "10.0.0.9", port) == verdict


def test_ssh_is_let_in_for_all_for_the_controller_or_before_what_denies_it() -> None:
    narrow = "allow from 10.0.0.9 to any port 22 proto tcp"
    assert firewall.ssh_rule([], "10.0.0.9", 22) == ("allow 22/tcp", False)
    assert firewall.ssh_rule(["allow 22/udp", "allow 22/tcp"], "10.0.0.9", 22) == (narrow, False)
    assert firewall.ssh_rule(["deny 22/tcp"], "10.0.0.9", 22) == (narrow, True)
    assert firewall.ssh_rule([narrow], "10.0.0.9", 22) == ("allow from 10.0.0.9 to any port 22", False)
    assert firewall.ssh_rule(["allow 2222/tcp"], "", 2222) == ("allow 2222", False)


# The range of ports


def test_the_file_remembers_what_was_before() -> None:
    text = ports.content(LOW, HIGH, "40000 50000")
    assert ports.setting(text) == f"{LOW} {HIGH}"
    assert ports.remembered(text) == "40000 50000"
    assert ports.remembered(f"net.ipv4.ip_local_port_range = {LOW} {HIGH}\n") == ports.KERNELS_RANGE


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("net.ipv4.ip_local_port_range=1024\t65535\n", "1024 65535"),
        ("# net.ipv4.ip_local_port_range = 1024 65535\n", ""),
        ("-net/ipv4/ip_local_port_range = 1024 65535\nnet.ipv4.ip_local_port_range = 5 6", "5 6"),
    ],
)
def test_a_sysctl_files_setting_is_read(text: str, value: str) -> None:
    assert ports.setting(text) == value


def test_files_read_after_ours_are_named_with_what_they_set() -> None:
    setting = "net.ipv4.ip_local_port_range = 1024 65535\n"
    files = {
        "/etc/sysctl.d/50-a.conf": setting,
        "/usr/lib/sysctl.d/99-b.conf": setting,
        "/etc/sysctl.d/99-c.conf": "",
    }
    later = ports.overriding("/etc/sysctl.d/60-nanofleet.conf", files)
    assert later == ["/usr/lib/sysctl.d/99-b.conf (1024 65535)"]


def test_reserved_ports_are_counted_within_the_range() -> None:
    assert ports.usable(LOW, HIGH, "") == 1000
    assert ports.usable(LOW, HIGH, f"8080,{HIGH - 9}-{HIGH + 51},{LOW}") == 989


def test_listeners_in_the_range_are_read_but_not_those_on_loopback() -> None:
    tcp = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:4E21 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1\n"
        "   1: 0100007F:4E22 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1\n"
        "   2: 0B00000A:4E23 0C00000A:0016 01 00000000:00000000 00:00000000 00000000  1000        0 1 1\n"
        "   3: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    )
    tcp6 = (
        "  sl  local_address\n"
        f"   0: {'0' * 32}:4E24 {'0' * 32}:0000 0A 0:0 0:0 0  7  0 1 1\n"
        f"   1: {'0' * 24}01000000:4E25 {'0' * 32}:0000 0A 0:0 0:0 0  7  0 1 1\n"
    )
    assert ports.listeners([tcp, tcp6], 0x4E20, 0x4E24) == [(0x4E21, 1000), (0x4E24, 7)]


def test_problems_of_the_port_range_are_reported() -> None:
    state = {
        "changed": True,
        "before": "40000 50000",
        "usable": 7,
        "reserved": f"{LOW}-{HIGH - 7}",
        "overriding": ["/etc/sysctl.d/99-c.conf (1024 65535)"],
        "listeners": [{"port": LOW + 1, "user": "postgres"}],
    }
    printed = [found["problem"] for found in rules.port_findings("tower", state, LOW, HIGH)]
    words = [
        "The file /etc/sysctl.d/99-c.conf (1024 65535) sets another",
        "from 40000-50000, which is not the kernel's default",
        "can use only 7 of the range",
        f"postgres listens on port {LOW + 1}. This port is in the range {DASHED}",
    ]
    assert len(printed) == len(words)
    assert all(word in line for word, line in zip(words, printed, strict=True))
    remedies = [found["remedy"] for found in rules.port_findings("tower", state, LOW, HIGH)]
    assert "about 1,000 ports in 40000-50000" in remedies[1]
    assert f"sudo ss -Hltnp sport = :{LOW + 1}" in remedies[3]
    quiet = {**state, "changed": False, "usable": 1000, "overriding": [], "listeners": []}
    assert list(rules.port_findings("tower", quiet, LOW, HIGH)) == []


# Hosts without sudo


@pytest.mark.parametrize(
    ("active", "span", "typed"),
    [
        ([], "32768\t60999\n", ""),
        (
            ["ufw"],
            "32768\t60999\n",
            f"echo 'net.ipv4.ip_local_port_range = {LOW} {HIGH}' | sudo tee /etc/sysctl.d/60-nanofleet.conf"
            " && sudo sysctl --load=/etc/sysctl.d/60-nanofleet.conf"
            f" && sudo ufw prepend allow from 10.0.0.10 to any port {COLON} proto tcp comment nanofleet"
            "  (on laptop)",
        ),
        (
            ["nft"],
            f"{LOW}\t{HIGH}\n",
            f"sudo nft 'insert rule inet filter input ip saddr {{ 10.0.0.10 }} tcp dport {{ {DASHED} }} "
            "accept'"
            "  (on laptop)",
        ),
    ],
)  # fmt: skip
def test_the_owner_of_a_host_without_sudo_gets_the_line_to_type(
    active: list[str], span: str, typed: str
) -> None:
    own = {
        "__network_listed": {"active": active},
        "__network_range": {"content": base64.b64encode(span.encode()).decode()},
    }
    found = rules.findings("laptop", own, {}, {**OPTIONS, "is_root": False})
    remedy = (
        f"if this was not done before, let a user with sudo type: {typed}, then: ansible-playbook doctor.yml"
    )
    assert [each["remedy"] for each in found[:-1]] == ([remedy] if typed else [])
    assert "only a firewall keeps other machines" in found[-1]["problem"]
    assert "sudo ufw allow 22/tcp && sudo ufw enable  (on laptop)" in found[-1]["remedy"]
    own["__network_ssh"] = {"stdout": "10.0.0.9 50000 10.0.0.11 2222\n"}
    found = rules.findings("laptop", own, {}, {**OPTIONS, "is_root": False})
    assert "sudo ufw allow 2222/tcp" in found[-1]["remedy"]


# Connections that were tried

OPTIONS = {
    "port_low": LOW, "port_high": HIGH, "store_port": 29500, "is_root": True, "comment": "nanofleet",
    "wanted": [{"source": "10.0.0.10", "port": COLON}],
}  # fmt: skip
QUIET = {"changed": False, "usable": 1000, "overriding": [], "listeners": []}
PORTS = [
    {"port": 29500, "role": "store", "picked": False}, {"port": 41234, "role": "gloo", "picked": True},
    {"port": LOW, "role": "gloo", "picked": False}, {"port": HIGH, "role": "gloo", "picked": False},
]  # fmt: skip


def tried(state: str, listed: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """The findings of two hosts, by host, where laptop's packets to tower end in this state."""
    hostvars: dict[str, Any] = {}
    for me, address, peer in (("tower", "10.0.0.10", "laptop"), ("laptop", "10.0.0.11", "tower")):
        seen = {"detail": "", "ms": 1.0, "seen": address}
        ports = [{**port, **seen, "state": state if me == "laptop" else "open"} for port in PORTS]
        hostvars[me] = {
            "__network_filter": {"stdout": "closed"},
            "__network_ports": QUIET,
            "network_address": address,
            "network_interface": "eth0",
            "__network_listening": {"ports": PORTS},
            "__network_tried": {"peers": {peer: {"ports": ports, "up": True, "rtt_ms": {"min": 900}}}},
            "__network_listed": {"rules": listed if me == "tower" else [], "active": []},
        }
    measured = rules.measured(list(hostvars), hostvars, LOW, HIGH)
    return {host: rules.findings(host, own, measured, OPTIONS) for host, own in hostvars.items()}


def test_another_firewall_that_drops_the_fleets_packets_is_a_warning_on_its_host() -> None:
    policy = make_rule(
        "nft", "INPUT", "policy", "nft table inet mine, chain in (policy drop)", place="inet mine in"
    )
    found = tried("filtered", [policy])
    assert found["laptop"] == []
    (warning,) = found["tower"]
    assert warning["severity"] == "warning"
    assert (
        f"laptop gets no answer from tower on the rendezvous store's port 29500 and Gloo's ports {DASHED}"
        in warning["problem"]
    )
    assert "table inet mine, chain in (policy drop) is active on tower" in warning["problem"]
    assert warning["remedy"].startswith(
        f"sudo nft 'insert rule inet mine in ip saddr {{ 10.0.0.11 }} tcp dport {{ {DASHED}, 29500 }} accept'"
    )


def test_open_connections_are_no_finding_however_long_they_took() -> None:
    assert tried("open", []) == {"tower": [], "laptop": []}


def test_hosts_that_did_not_listen_are_not_judged() -> None:
    own: dict[str, Any] = {"__network_listening": {"skipped": True}, "__network_tried": {"peers": {}}}
    hostvars = {"tower": own, "laptop": {}}
    measured = rules.measured(list(hostvars), hostvars, LOW, HIGH)
    assert (
        rules.findings(
            "tower", {"__network_filter": {"stdout": "closed"}, "__network_ports": QUIET}, measured, OPTIONS
        )
        == []
    )
