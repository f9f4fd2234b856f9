"""The network role's rules: ufw made equal to them, SSH kept open, the port range, other firewalls read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import network_rules as rules
from ansible_collections.nanofleet.fleet.plugins.modules import ephemeral_ports as ports
from ansible_collections.nanofleet.fleet.plugins.modules import firewall_in_force as in_force
from ansible_collections.nanofleet.fleet.plugins.modules import fleet_firewall as firewall

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
    wanted = rules.rules(["10.0.0.10", "10.0.0.12"], "20000:20999", 29500, 5000, False, ["10.0.0.1"])
    assert wanted == [{"source": a, "port": "20000:20999"} for a in ("10.0.0.10", "10.0.0.12")]


def test_the_coordinator_also_serves_the_store_and_the_tracker() -> None:
    wanted = rules.rules(
        ["10.0.0.11"], "20000:20999", 29500, 5000, True, ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    )
    assert [rules.rule_line(rule) for rule in wanted] == [
        "port 20000:20999 from 10.0.0.11",
        "port 29500 from 10.0.0.11",
        "port 5000 from 10.0.0.11",
        "port 5000 from 10.0.0.1",
        "port 5000 from 10.0.0.2",
    ]


@pytest.mark.parametrize("controller", ["", "127.0.0.1", "::1", "fe80::1%eth0", "10.0.0.11"])
def test_the_controller_needs_no_rule_if_local_unknown_or_a_peer(controller: str) -> None:
    wanted = rules.rules(["10.0.0.11"], "20000:20999", 29500, 5000, True, [controller])
    assert {rule["source"] for rule in wanted} == {"10.0.0.11"}


def test_each_firewall_gets_the_command_in_its_own_words() -> None:
    wanted = rules.rules(["10.0.0.11", "fd00::11"], "20000:20999", 29500, 5000, True)
    assert rules.commands("nft", wanted, chain="inet filter input") == [
        f"sudo nft 'insert rule inet filter input {saddr} tcp dport {{ 20000-20999, 29500, 5000 }} accept'"
        for saddr in ("ip saddr { 10.0.0.11 }", "ip6 saddr { fd00::11 }")
    ]
    assert rules.commands("iptables", wanted)[1] == (
        "sudo ip6tables -I INPUT -s fd00::11 -p tcp -m multiport --dports 20000:20999,29500,5000 -j ACCEPT"
    )
    firewalld = rules.commands("firewalld", wanted[:1], zone="public")
    assert firewalld[0].startswith(
        'sudo firewall-cmd --permanent --zone=public --add-rich-rule=\'rule family="ipv4"'
    )
    assert firewalld[-1] == "sudo firewall-cmd --reload"
    assert rules.commands("ufw", wanted[:1]) == [
        "sudo ufw prepend allow from 10.0.0.11 to any port 20000:20999 proto tcp comment nanofleet"
    ]


# ufw

ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow from 10.0.0.11 to any port 20000:20999 proto tcp comment 'nanofleet'
ufw allow from 10.0.0.12 to any port 20000:20999 proto tcp comment 'nanofleet'
ufw allow from 10.0.0.13 to any port 20000:20999 proto tcp
ufw allow from 10.0.0.14 to any port 29500 proto tcp comment 'backup'
ufw deny from 10.0.0.15 to any port 29500 proto tcp comment 'of the attic'
ufw allow OpenSSH
ufw allow 8080/tcp comment 'it is mine'
ufw allow 22/tcp comment 'nanofleet ssh'
"""


def test_rules_are_read_with_their_comments() -> None:
    added = firewall.parse_added(ADDED)
    assert added["allow from 10.0.0.11 to any port 20000:20999 proto tcp"] == "nanofleet"
    assert added["allow from 10.0.0.13 to any port 20000:20999 proto tcp"] == ""
    assert added["allow 8080/tcp"] == "it is mine"
    assert len(added) == 8
    assert firewall.parse_added("Added user rules (see 'ufw status' for running firewall):\n(None)\n") == {}


def test_only_our_rules_leave_and_other_peoples_rules_are_left_as_they_are() -> None:
    wanted = [
        firewall.as_rule(source, port)
        for source, port in (
            ("10.0.0.11", "20000:20999"),
            ("10.0.0.13", "20000:20999"),
            ("10.0.0.16", "29500"),
        )
    ]
    add, delete = firewall.plan(firewall.parse_added(ADDED), wanted, "nanofleet")
    assert add == ["allow from 10.0.0.16 to any port 29500 proto tcp"]
    assert delete == ["allow from 10.0.0.12 to any port 20000:20999 proto tcp"]


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
        (["allow OpenSSH"], 22, "allow"),
        (["limit 22/tcp"], 22, "allow"),
        (["allow 2222"], 2222, "allow"),
        (["allow 80,2000:3000/tcp"], 2222, "allow"),
        (["allow OpenSSH"], 2222, ""),
        (["allow 22/udp"], 22, ""),
        (["deny 22/tcp", "allow OpenSSH"], 22, "deny"),
        (["allow from 10.0.0.0/24 to any port 22 proto tcp"], 22, "allow"),
        (["allow from 10.0.0.0/24 to any app OpenSSH"], 22, "allow"),
        (["allow from 10.0.1.0/24 to any port 22 proto tcp"], 22, ""),
        (["allow from 10.0.0.9"], 22, "allow"),
        (["reject from 10.0.0.0/8", "allow OpenSSH"], 22, "deny"),
        (["allow in on wlan0 to any port 22"], 22, ""),
        (["deny in on wlan0 to any port 22"], 22, "deny"),
        (["allow to 10.0.0.10 port 22"], 22, ""),
        (["deny out 22", "allow log 22/tcp"], 22, "allow"),
        (["route allow in on eth0 out on eth1"], 22, ""),
        (["allow 'Nginx Full'"], 22, ""),
    ],
)
def test_the_first_rule_that_speaks_of_the_controllers_ssh_decides(
    lines: list[str], port: int, verdict: str
) -> None:
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
    text = ports.content(20000, 20999, "40000 50000")
    assert ports.setting(text) == "20000 20999"
    assert ports.remembered(text) == "40000 50000"
    assert ports.remembered("net.ipv4.ip_local_port_range = 20000 20999\n") == ports.DEFAULT


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
    assert ports.usable(20000, 20999, "") == 1000
    assert ports.usable(20000, 20999, "8080,20990-21050,20000") == 989


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
    assert ports.listeners([tcp, tcp6], 20000, 20999) == [(20001, 1000), (20004, 7)]


def test_what_stands_in_the_ranges_way_is_said_in_sentences() -> None:
    state = {
        "changed": True,
        "before": "40000 50000",
        "usable": 7,
        "reserved": "20000-20992",
        "overriding": ["/etc/sysctl.d/99-c.conf (1024 65535)"],
        "listeners": [{"port": 20001, "user": "postgres"}],
    }
    said = [found["problem"] for found in rules.port_findings("tower", state, 20000, 20999)]
    words = [
        "/etc/sysctl.d/99-c.conf (1024 65535) sets another",
        "was 40000-50000",
        "leaves 7 ports",
        "20001 in 20000-20999 is served by postgres",
    ]
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))
    quiet = {**state, "changed": False, "usable": 1000, "overriding": [], "listeners": []}
    assert rules.port_findings("tower", quiet, 20000, 20999) == []


# Other firewalls

WANTED = [{"source": "10.98.6.11", "port": "20000:20999"}]
FIREWALLD = json.loads((Path(__file__).parent / "listings" / "firewalld.json").read_text())
"""What `nft --json list ruleset` printed on a Debian 12 host with firewalld, after the command that
`network_commands` gives for the peer 10.98.6.11 was typed; the chains of what comes in."""

IPTABLES = """*filter
:INPUT DROP [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:guard - [0:0]
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -i lo -j ACCEPT
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A INPUT -m limit --limit 3/min -j LOG --log-prefix "[DROP ] "
-A INPUT -p tcp -j guard
{rule}
COMMIT
"""


def blocked(
    nft: dict[str, Any] | None = None, iptables: str = "", ip6tables: str = "", wanted: Any = WANTED
) -> list[str]:
    listings = {"nft": nft or {}, "iptables": iptables, "ip6tables": ip6tables}
    return [entry["chain"] for entry in in_force.find_blocked(wanted, listings, "eth0", "10.98.6.12")]


@pytest.mark.parametrize(
    ("seen", "typed"),
    [
        (["range=32768 60999"], ""),
        (
            ["range=32768 60999", "firewall=ufw"],
            "echo 'net.ipv4.ip_local_port_range = 20000 20999' | sudo tee /etc/sysctl.d/60-nanofleet.conf"
            " && sudo sysctl --load=/etc/sysctl.d/60-nanofleet.conf"
            " && sudo ufw prepend allow from 10.0.0.10 to any port 20000:20999 proto tcp comment nanofleet"
            "  (on laptop)",
        ),
        (
            ["range=20000 20999", "firewall=nftables"],
            "sudo nft 'insert rule inet filter input ip saddr { 10.0.0.10 } tcp dport { 20000-20999 } accept'"
            "  (on laptop)",
        ),
    ],
)  # fmt: skip
def test_the_owner_of_a_host_without_sudo_gets_the_line_to_type(seen: list[str], typed: str) -> None:
    wanted = [{"source": "10.0.0.10", "port": "20000:20999"}]
    found = rules.owner_findings("laptop", seen, wanted, 20000, 20999)
    assert [each["remedy"] for each in found] == ([typed] if typed else [])


def test_firewalld_lets_in_whom_its_rich_rule_names_and_nobody_else() -> None:
    assert blocked(FIREWALLD) == []
    other = [{"source": "10.98.6.13", "port": "20000:20999"}, {"source": "fd42::11", "port": "20000:20999"}]
    listings = {"nft": FIREWALLD, "iptables": "", "ip6tables": ""}
    (entry,) = in_force.find_blocked([*WANTED, *other], listings, "eth0", "10.98.6.12")
    assert entry["firewall"] == "firewalld"
    assert entry["chain"] == "table inet firewalld, chain filter_INPUT"
    assert entry["rules"] == other


def nft(*expressions: list[dict[str, Any]], policy: str = "drop", **sets: list[Any]) -> dict[str, Any]:
    where = {"family": "inet", "table": "mine"}
    made: list[dict[str, Any]] = [
        {"set": {**where, "name": name, "elem": elem}} for name, elem in sets.items()
    ]
    made.append({"chain": {**where, "name": "in", "type": "filter", "hook": "input", "policy": policy}})
    return {"nftables": [*made, *({"rule": {**where, "chain": "in", "expr": e}} for e in expressions)]}


def match(left: dict[str, Any], right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


SADDR = {"payload": {"protocol": "ip", "field": "saddr"}}
DPORT = {"payload": {"protocol": "tcp", "field": "dport"}}
STATE = {"ct": {"key": "state"}}
ACCEPT: dict[str, Any] = {"accept": None}
SPAN = {"range": [20000, 20999]}
DROP: dict[str, Any] = {"drop": None}


@pytest.mark.parametrize(
    ("listing", "open_"),
    [
        (nft(), False),
        (nft(policy="accept"), True),
        (nft([match(STATE, ["established", "related"], "in"), ACCEPT]), False),
        (nft([match(SADDR, {"prefix": {"addr": "10.98.6.0", "len": 24}}), ACCEPT]), True),
        (nft([match(SADDR, {"set": ["10.98.6.10", "10.98.6.11"]}), match(DPORT, SPAN), ACCEPT]), True),
        (nft([match(SADDR, "@fleet"), ACCEPT], fleet=["10.98.6.11"]), True),
        (nft([match(SADDR, "@fleet"), ACCEPT], fleet=["10.98.6.12"]), False),
        (nft([match(SADDR, "10.98.6.11", "!="), ACCEPT]), False),
        (nft([match({"payload": {"protocol": "udp", "field": "dport"}}, 20000), ACCEPT]), False),
        (nft([match({"payload": {"protocol": "ip6", "field": "saddr"}}, "fd42::11"), ACCEPT]), False),
        (nft([match({"meta": {"key": "iifname"}}, "eth*"), ACCEPT]), True),
        (nft([{"counter": {}}, match(DPORT, {"range": [1024, 65535]}), DROP], policy="accept"), False),
        (nft([match(STATE, "invalid", "in"), DROP], policy="accept"), True),
        (nft([{"vmap": {"key": STATE, "data": {"set": [["new", DROP]]}}}], policy="accept"), False),
        (nft([{"limit": {"rate": 5}}, ACCEPT]), True),  # cannot be read: no verdict
        (nft([{"xt": None}, DROP], policy="accept"), True),
    ],
)  # fmt: skip
def test_nft_rules_are_walked_as_the_kernel_does(listing: dict[str, Any], open_: bool) -> None:
    assert blocked(listing) == ([] if open_ else ["table inet mine, chain in"])


@pytest.mark.parametrize(
    ("rule", "open_"),
    [
        ("", False),
        ("-A guard -s 10.98.6.0/24 -p tcp -m multiport --dports 80,20000:20999 -j ACCEPT", True),
        ("-A guard -s 10.98.6.11/32 -p tcp -m tcp --dport 20000:20999 -j RETURN", False),
        ("-A guard ! -s 10.98.6.11/32 -p tcp -j ACCEPT", False),
        ("-A guard -m set --match-set fleet src -j ACCEPT", True),  # cannot be read: no verdict
        ("-A guard -p udp -j ACCEPT", False),
        ('-A guard -m comment --comment "from -s 10.9.9.9" -j ACCEPT', True),
        ("-A guard -d 10.98.6.99/32 -j ACCEPT", False),
        ("-A guard -m addrtype --dst-type LOCAL -j ACCEPT", True),
        ("-A guard -m addrtype --dst-type BROADCAST -j ACCEPT", False),
        ("-A guard -j NFQUEUE --queue-num 0", True),
        ("-A guard -j MARK --set-xmark 0x1/0xffffffff", False),
    ],
)
def test_iptables_rules_are_walked_as_the_kernel_does(rule: str, open_: bool) -> None:
    assert blocked(iptables=IPTABLES.format(rule=rule)) == ([] if open_ else ["iptables, chain INPUT"])


def test_tables_that_iptables_shows_are_not_judged_by_nfts_view_of_them() -> None:
    listing = nft()
    for entry in listing["nftables"]:
        for value in entry.values():
            value.update(family="ip", table="filter")
    assert blocked(listing) == ["table ip filter, chain in"]
    open_ = IPTABLES.format(rule="-A guard -j ACCEPT")
    assert blocked(listing, iptables=open_) == []


def test_ipv6_peers_are_judged_by_ip6tables() -> None:
    closed = "*filter\n:INPUT DROP [0:0]\nCOMMIT\n"
    six = [{"source": "fd42::11", "port": "29500"}]
    assert blocked(iptables=closed, wanted=six) == []
    assert blocked(ip6tables=closed, wanted=six) == ["ip6tables, chain INPUT"]


def test_a_verdict_names_peer_chain_and_command() -> None:
    entry = {
        "chain": "table inet mine, chain in",
        "firewall": "nft",
        "place": "inet mine in",
        "zone": "",
        "rules": WANTED,
    }
    (found,) = rules.firewall_findings("tower", [entry], {"laptop": "10.98.6.11"})
    assert "drops TCP 20000-20999 from laptop: table inet mine, chain in" in found["problem"]
    assert found["remedy"].startswith("sudo nft 'insert rule inet mine in ip saddr { 10.98.6.11 }")
    assert found["remedy"].endswith("(on tower)")
