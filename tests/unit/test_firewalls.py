"""The firewalls' listings: which rule is picked for a lost connection, and what is typed.

listings/*.txt are what `nft --stateless --handle list ruleset` (1.0.6) and `iptables-save` (1.8.9) printed in
a network namespace of Debian 12 with rules made by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import firewalls
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import Rule
from measured_fleet import close_ports, fleet, only
from port_range import COLON, DASHED, LOW

LISTINGS = Path(__file__).parent / "listings"


def recorded(name: str) -> str:
    """A recorded listing, with the present port range instead of the one when it was recorded."""
    text = (LISTINGS / name).read_text()
    return text.replace("20000-20999", DASHED).replace("20000:20999", COLON)


NFT = {"nft --stateless --handle list ruleset": recorded("nft.txt")}
IPTABLES = {"iptables-save": recorded("iptables.txt")}
UFW = {
    "ufw status": "Status: active\n",
    "ufw show added": (
        "Added user rules (see 'ufw status' for running firewall):\n"
        f"ufw deny from 10.0.0.1 to any port {COLON} proto tcp\n"
        "ufw reject out to 10.0.0.2\n"
        "ufw allow from 10.0.0.3 to any port 29500 proto tcp comment 'nanofleet'\n"
        "ufw allow 8080/tcp\n"
    ),
}
FIREWALLD = {
    "firewall-cmd --get-zone-of-interface=eth0": "",
    "firewall-cmd --get-default-zone": "public\n",
    "firewall-cmd --zone=public --list-all": (
        "public\n  target: default\n  icmp-block-inversion: no\n  interfaces: \n  sources: \n"
        "  services: dhcpv6-client ssh\n  ports: \n  rich rules: \n"
    ),
}


def read(*listings: dict[str, str]) -> list[Rule]:
    """All rules of a host with these listings."""
    printed = {line: text for listing in listings for line, text in listing.items()}
    return [
        rule
        for each in firewalls.FIREWALLS.values()
        for rule in each.rules(lambda line: printed.get(line, ""), "eth0")
    ]


def nft(chain: str, more: str = "") -> dict[str, str]:
    """A listing of one chain `in` of a table inet mine, after what `more` lists."""
    lines = "".join(f"\t\t{line}\n" for line in chain.splitlines())
    return {
        next(iter(NFT)): f"table inet mine {{ # handle 1\n{more}\tchain in {{ # handle 1\n{lines}\t}}\n}}\n"
    }


def lost(rules: list[Rule], role: str = "gloo", where: str = "laptop", address: str = "") -> dict[str, str]:
    """The doctor's finding where tower does not reach laptop, one of them having these rules."""
    measured: Any = fleet("tower", "laptop")
    if address:
        measured["tower"]["address"] = address
        for path in (measured["tower"]["paths"]["laptop"], measured["laptop"]["paths"]["tower"]):
            for port in path["ports"]:
                port["seen"] = ""
    caller, called = ("tower", "laptop") if role == "gloo" else ("laptop", "tower")
    close_ports(measured, caller, called, "filtered", role)
    measured["tower"]["firewall"] = measured["laptop"]["firewall"] = []
    measured[where]["firewall"] = rules
    return only(measured)


SYN = f"-s 10.0.0.1/32 -p tcp -m tcp --dport {COLON} --tcp-flags FIN,SYN,RST,ACK SYN -j DROP"
LACKS = "has no rule that lets tower in."
HOOK = "type filter hook input priority filter; policy"


@pytest.mark.parametrize(
    ("listing", "text", "remedy"),
    [
        (
            NFT,
            "nft table inet mine, chain guard:"
            f" ip saddr 10.0.0.1 tcp dport {DASHED} ct state new counter drop.",
            "sudo nft delete rule inet mine guard handle 3",
        ),
        (
            IPTABLES,
            f"iptables -A INPUT {SYN}.",
            f"sudo iptables -D INPUT {SYN}",
        ),
        (
            UFW,
            f"ufw deny from 10.0.0.1 to any port {COLON} proto tcp.",
            f"sudo ufw delete deny from 10.0.0.1 to any port {COLON} proto tcp",
        ),
    ],
)  # fmt: skip
def test_a_plain_drop_is_named_with_what_removes_it(listing: dict[str, str], text: str, remedy: str) -> None:
    found = lost(read(listing))
    assert f"This firewall rule on laptop is the cause: {text}" in found["problem"]
    assert found["remedy"] == f"{remedy}  (on laptop)"


@pytest.mark.parametrize(
    ("listing", "text", "remedy"),
    [
        (
            nft(f"{HOOK} drop;"),
            f"nft table inet mine, chain in (policy drop) is active on laptop and {LACKS}",
            f"sudo nft 'insert rule inet mine in ip saddr {{ 10.0.0.1 }} tcp dport {{ {DASHED} }} accept'"
            "  (and the same in /etc/nftables.conf, to keep it)",
        ),
        (
            nft(f"{HOOK} accept;\ntcp dport 22 accept # handle 4\nreject with tcp reset # handle 5"),
            "nft table inet mine, chain in (reject with tcp reset) is active on laptop",
            "sudo nft 'insert rule inet mine in",
        ),
        (
            {"iptables-save": "*filter\n:INPUT DROP [0:0]\n-A INPUT -p tcp --dport 22 -j ACCEPT\nCOMMIT\n"},
            f"iptables chain INPUT (policy DROP) is active on laptop and {LACKS}",
            f"sudo iptables -I INPUT -s 10.0.0.1 -p tcp -m multiport --dports {COLON} -j ACCEPT"
            "  (and sudo netfilter-persistent save, to keep it)",
        ),
        (
            FIREWALLD,
            "firewalld zone public (target: default; services: dhcpv6-client ssh) is active on laptop",
            "sudo firewall-cmd --permanent --zone=public --add-rich-rule='rule family=\"ipv4\"",
        ),
        ({**UFW, "ufw show added": ""}, f"ufw is active on laptop and {LACKS}", "ansible-playbook setup.yml"),
    ],
)  # fmt: skip
def test_a_policy_is_named_with_what_admits_the_peer(listing: dict[str, str], text: str, remedy: str) -> None:
    found = lost(read(listing))
    assert (found["code"], found["host"]) == ("NF528", "laptop")
    assert text in found["problem"]
    assert found["remedy"].startswith(remedy)


@pytest.mark.parametrize(
    ("rule", "is_shown"),
    [
        (f"ip saddr @fleet tcp dport {DASHED} drop", True),
        (f"tcp dport vmap {{ 22 : accept, {DASHED} : drop }}", True),
        (f"limit rate over 5/second tcp dport {DASHED} drop", True),
        ('iifname "eth0" ip saddr 10.0.0.0/8 drop', True),
        (f'iifname "eth0" tcp dport {DASHED} jump closed', True),
        ("ip saddr @fleet tcp dport 29500 drop", False),
        ('iifname "eth0" ip saddr 10.0.0.9 drop', False),
        ("ct state invalid drop", False),
        ("ct state { established, related } accept", False),
        (f"limit rate over 5/second udp dport {DASHED} drop", False),
        ("meta l4proto icmp drop", False),
        ("ip6 saddr != fd00::/8 tcp dport 22 drop", False),
        (f'tcp dport {DASHED} log prefix "drop "', False),
        (f'tcp dport {DASHED} accept comment "do not drop"', False),
    ],
)
def test_rules_that_may_drop_them_are_shown_and_none_is_to_be_removed(rule: str, is_shown: bool) -> None:
    closed = "\tchain closed { # handle 2\n\t\tcounter drop # handle 3\n\t}\n"
    found = lost(read(nft(f"{HOOK} accept;\n{rule} # handle 9", closed)))
    if is_shown:
        shown = "chain closed: counter drop" if "jump" in rule else f"chain in: {rule}"
        assert (
            f"Firewall rules of laptop that may drop these packets: nft table inet mine, {shown}."
            in found["problem"]
        )
        listed = "the rules are listed by: sudo nft list ruleset  (on laptop)"
        assert found["remedy"] == f"delete the one that drops them; {listed}"
    else:
        assert "No firewall rule of tower or laptop explains that" in found["problem"]


def test_chains_that_packets_do_not_pass_are_not_shown() -> None:
    rules = read(
        nft("type filter hook forward priority filter; policy drop;\ntcp dport 1-65535 drop # handle 5")
    )
    assert rules == []
    other = {"iptables-save": "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -j DROP\n-A DOCKER -j DROP\nCOMMIT\n"}
    assert read(other) == []


@pytest.mark.parametrize(
    ("accepted", "is_blamed"),
    [
        ("ip saddr 10.0.0.1 accept", False),
        (f"ip saddr 10.0.0.0/24 tcp dport {{ 22, {DASHED} }} ct state {{ established, new }} accept", False),
        ("ct state established,related accept", True),
        (f"ip saddr 10.0.0.1 tcp dport {LOW} accept", True),
        (f"ip saddr 10.0.0.9 tcp dport {DASHED} accept", True),
        ("ip saddr != 10.0.0.1 accept", True),
        (f"udp dport {DASHED} accept", True),
        ("ip6 saddr fd00::1 accept", True),
    ],
)  # fmt: skip
def test_a_policy_with_a_rule_that_admits_the_peer_is_not_the_cause(accepted: str, is_blamed: bool) -> None:
    found = lost(read(nft(f"{HOOK} drop;\n{accepted} # handle 5")))
    assert ("(policy drop) is active" in found["problem"]) == is_blamed
    assert ("No firewall rule of" in found["problem"]) != is_blamed


def test_rules_of_one_version_of_ip_are_for_it_alone() -> None:
    six = {"ip6tables-save": f"*filter\n:INPUT DROP [0:0]\n-A INPUT -p tcp --dport {COLON} -j DROP\nCOMMIT\n"}
    assert "No firewall rule of" in lost(read(six))["problem"]
    found = lost(read(six), address="fd00::1")
    assert found["remedy"] == f"sudo ip6tables -D INPUT -p tcp --dport {COLON} -j DROP  (on laptop)"
    own = {
        next(
            iter(NFT)
        ): "table ip6 own {\n\tchain in {\n\t\ttype filter hook input priority 0; policy drop;\n\t}\n}\n"
    }
    assert "No firewall rule of" in lost(read(own))["problem"]
    assert "ip6 saddr { fd00::1 }" in lost(read(own), address="fd00::1")["remedy"]


def test_outgoing_packets_are_dropped_by_rules_and_policies_of_the_sender() -> None:
    out = "type filter hook output priority filter; policy"
    found = lost(
        read(nft(f"{out} accept;\nip daddr 10.0.0.2 tcp dport {DASHED} reject # handle 8")), where="tower"
    )
    assert (found["host"], found["remedy"]) == (
        "tower",
        "sudo nft delete rule inet mine in handle 8  (on tower)",
    )
    found = lost(read(nft(f"{out} drop;")), where="tower")
    assert "has no rule that lets tower reach laptop." in found["problem"]
    assert found["remedy"] == (
        f"add a rule for outgoing TCP to ports {DASHED} and 29500 of 10.0.0.2; the rules are listed by: sudo "
        "nft list ruleset  (on tower)"
    )
    assert "No firewall rule of" in lost(read(nft(f"{out} drop;")))["problem"], (
        "answers are no new connections"
    )


def test_what_iptables_and_firewalld_keep_in_nfts_tables_is_not_read_twice() -> None:
    assert {rule["place"].split()[1] for rule in read(NFT)} >= {"mine", "own", "filter"}
    places = {rule["place"] for rule in read(NFT, IPTABLES) if rule["firewall"] == "nft"}
    assert places == {"inet mine guard", "inet mine closed", "inet mine out", "ip6 own in"}


def test_iptables_rules_are_read_with_what_deletes_them() -> None:
    rules = [rule for rule in read(IPTABLES) if rule["verdict"] == "drop"]
    assert [rule["remedy"] for rule in rules] == [
        "sudo iptables -t mangle -D PREROUTING -s 10.0.0.4/32 -p tcp -m tcp --dport 29500 -j DROP",
        f"sudo iptables -D INPUT {SYN}",
        "sudo iptables -D INPUT ! -s 10.0.0.0/24 -p tcp -m multiport --dports 22,29500"
        " -j REJECT --reject-with tcp-reset",
        "",
        "sudo iptables -D OUTPUT -d 10.0.0.2/32 -p tcp -m length --length 1301:65535 -j DROP",
    ]  # fmt: skip
    keys = ("chain", "source", "ports", "length")
    assert [tuple(rule[key] for key in keys) for rule in rules[1:]] == [
        ("INPUT", "10.0.0.1/32", COLON, ""),
        ("INPUT", "!=10.0.0.0/24", "22,29500", ""),
        ("INPUT", "10.0.0.3/32", "", ""),
        ("OUTPUT", "10.0.0.2/32", "", "1301:65535"),
    ]


def test_of_ufw_only_its_own_listing_is_read() -> None:
    saved = (
        "*filter\n:INPUT DROP [0:0]\n:ufw-before-input - [0:0]\n:ufw-user-input - [0:0]\n"
        "-A INPUT -j ufw-before-input\n-A ufw-before-input -j ufw-user-input\n"
        "-A ufw-user-input -s 10.0.0.1/32 -j DROP\nCOMMIT\n"
    )
    rules = read({**UFW, "iptables-save": saved})
    assert {rule["firewall"] for rule in rules} == {"ufw"}
    kinds = [
        (rule["verdict"], rule["chain"], rule["source"], rule["ports"], rule["protocol"]) for rule in rules
    ]
    assert kinds == [
        ("policy", "INPUT", "", "", ""),
        ("drop", "INPUT", "10.0.0.1", COLON, "tcp"),
        ("drop", "OUTPUT", "10.0.0.2", "", ""),
        ("accept", "INPUT", "10.0.0.3", "29500", "tcp"),
        ("accept", "INPUT", "", "8080", "tcp"),
    ]
    assert read({**UFW, "ufw status": "Status: inactive\n"}) == []


def test_a_black_hole_is_named_by_nfts_rule_about_lengths() -> None:
    measured: Any = fleet("tower", "laptop")
    measured["tower"]["paths"]["laptop"]["mtu"] = {"sent": 1500, "passes": 1300, "swallowed": True}
    measured["laptop"]["firewall"] = read(NFT)
    assert only(measured)["remedy"] == "sudo nft delete rule inet mine guard handle 11  (on laptop)"


def test_each_firewall_has_its_own_command() -> None:
    ports = (COLON, "29500", "5000")
    wanted = [{"source": source, "port": port} for source in ("10.0.0.11", "fd00::11") for port in ports]
    permit = {name: each.permit for name, each in firewalls.FIREWALLS.items()}
    assert permit["nft"](wanted, "inet filter input", "") == [
        f"sudo nft 'insert rule inet filter input {saddr} tcp dport {{ {DASHED}, 29500, 5000 }} accept'"
        for saddr in ("ip saddr { 10.0.0.11 }", "ip6 saddr { fd00::11 }")
    ]
    assert permit["iptables"](wanted, "", "")[1] == (
        f"sudo ip6tables -I INPUT -s fd00::11 -p tcp -m multiport --dports {COLON},29500,5000 -j ACCEPT"
    )
    firewalld = permit["firewalld"](wanted[:1], "public", "")
    assert firewalld[0].startswith(
        'sudo firewall-cmd --permanent --zone=public --add-rich-rule=\'rule family="ipv4"'
    )
    assert firewalld[-1] == "sudo firewall-cmd --reload"
    assert permit["ufw"](wanted[:1], "", "nanofleet") == [
        f"sudo ufw prepend allow from 10.0.0.11 to any port {COLON} proto tcp comment nanofleet"
    ]


@pytest.mark.parametrize(
    ("written", "low", "high", "holds"),
    [
        ("", 22, 22, True),
        ("22,80-90", 85, 100, True),
        ("22,80-90", 91, 100, False),
        ("!22", 22, 22, False),
        ("!22", 20, 30, True),
        ("!20:30", 22, 25, False),
        (">=1024", 29500, 29500, True),
        (">1023", 1000, 1023, False),
        ("<=1023", 1023, 2000, True),
        ("<1024", 1024, 29500, False),
        ("@trusted", 22, 22, False),
    ],
)
def test_a_port_condition_holds_if_it_has_one_of_the_ports(
    written: str, low: int, high: int, holds: bool
) -> None:
    assert firewalls.holds_port(written, low, high) is holds
