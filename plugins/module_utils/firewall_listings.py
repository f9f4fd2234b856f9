# SPDX-License-Identifier: MIT
"""The rules of this host's firewalls that may drop packets, parsed from listings.

Whether a packet passes all rules is not computed.
A rule is a dict of strings:
    firewall, place     a key of FIREWALLS; where the rule is (nft: FAMILY TABLE CHAIN, firewalld: the zone)
    chain               INPUT for rules that incoming packets pass, OUTPUT for outgoing packets
    verdict             drop (also reject), accept, or policy: packets that no other rule accepts are dropped
    text                the rule as its firewall prints it
    remedy              the command that deletes a drop rule, if this rule alone decides; else empty
    version             4 or 6 if the rule is for one version of IP; else empty
    protocol, source, ports, length     its conditions, empty for any; in OUTPUT, source is the destination
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping

Rule = dict[str, str]
Run = Callable[[str], str]
"""Returns what a command line prints; empty if it fails or is not installed."""


def make_rule(firewall: str, chain: str, verdict: str, text: str, **more: str) -> Rule:
    """A rule with these fields (see the top of this file); fields that are not given are "".

    more: further fields.
    """
    empty = dict.fromkeys(("place", "remedy", "version", "protocol", "source", "ports", "length"), "")
    return {**empty, "firewall": firewall, "chain": chain, "verdict": verdict, "text": text, **more}


# -- ufw -----------------------------------------------------------------------------------------------------


UFW_ACTIONS = {"allow": "accept", "limit": "accept", "deny": "drop", "reject": "drop"}
SSH_NAMES = ("ssh", "SSH", "OpenSSH")
"""Names for port 22 in ufw: the service and the profiles."""


def ufw_rules(run: Run, _interface: str) -> list[Rule]:
    """Rules of ufw; [] if ufw is not active. run: a function that returns what a command line prints."""
    if "Status: active" not in run("ufw status"):
        return []
    rules = map(ufw_rule, run("ufw show added").splitlines())
    return [make_rule("ufw", "INPUT", "policy", "ufw"), *(rule for rule in rules if rule)]


def ufw_rule(line: str) -> Rule | None:
    """One line of `ufw show added` as a rule; None for other lines and for rules about routed packets."""
    line = line.strip().partition(" comment ")[0]
    words = shlex.split(line) if line.startswith("ufw ") else []
    if len(words) < 3 or words[1] not in UFW_ACTIONS:
        return None
    # `ufw allow [in|out] [log] PORT`, or pairs of a word and its value.
    rest = [word for word in words[2:] if word not in ("in", "out", "log", "log-all")]
    after = dict(itertools.pairwise(words))
    outgoing = words[2] == "out"
    port = rest[0] if len(rest) == 1 else after.get("port") or after.get("app", "")
    port, _slash, protocol = port.partition("/")
    return make_rule(
        "ufw", "OUTPUT" if outgoing else "INPUT", UFW_ACTIONS[words[1]], line,
        remedy=f"sudo {line.replace('ufw', 'ufw delete', 1)}", protocol=after.get("proto", protocol),
        source=after.get("to" if outgoing else "from", ""), ports="22" if port in SSH_NAMES else port,
    )  # fmt: skip


# -- firewalld -----------------------------------------------------------------------------------------------


def firewalld_rules(run: Run, interface: str) -> list[Rule]:
    """The policy of one zone of firewalld, as a list with one rule; [] if firewalld is not active.

    The text of the rule lists the settings of the zone. run: a function that returns what a command line
    prints. interface: the interface to the peers, which selects the zone.
    """
    zone = run(f"firewall-cmd --get-zone-of-interface={interface}") or run("firewall-cmd --get-default-zone")
    zone = zone.strip()
    if not zone:
        return []
    lines = [line.strip() for line in run(f"firewall-cmd --zone={zone} --list-all").splitlines()[1:]]
    shown = "; ".join(line for line in lines if line and not line.endswith((":", " no")))
    return [make_rule("firewalld", "INPUT", "policy", f"firewalld zone {zone} ({shown})", place=zone)]


# -- nft and iptables ----------------------------------------------------------------------------------------

Line = tuple[str, str, str]
"""(rule as it is printed, the same in the syntax of nft, command that removes it)."""
# The conditions that a rule dict can hold, and parts without effect. If a rule has other parts, read_rule
# leaves it out (accept) or gives it no remedy (drop).
KNOWN = (
    r"(?i)(ip6? ENDaddr|(tcp|udp|th) dport|meta l4proto|ip protocol|ip6 nexthdr|(meta|ip) length) "
    r"((!=|[<>]=?) )?({[^}]*}|[^@\s]\S*)|ct state (\S*\bnew\b\S*|{[^}]*\bnew\b[^}]*})|counter|log"
)
NFT_HOOKS = {"ingress": "INPUT", "prerouting": "INPUT", "input": "INPUT", "output": "OUTPUT"}
IPTABLES_CHAINS = {"PREROUTING": "INPUT", "INPUT": "INPUT", "OUTPUT": "OUTPUT"}
IPTABLES_AS_NFT = (
    (r"! (-\S+)", r"\1 !="), (r"-s", "ip saddr"), (r"-d", "ip daddr"), (r"-p", "meta l4proto"),
    (r"-m \S+", ""), (r"--dports?", "tcp dport"), (r"--length", "meta length"), (r"--(ct)?state", "ct state"),
    (r"--tcp-flags \S+ SYN", ""), (r'--comment ("[^"]*"|\S+)', ""), (r"-j (ACCEPT|DROP|REJECT)", r"\1"),
    (r"-[jg]", "jump"),
)  # fmt: skip


def nft_rules(run: Run, _interface: str) -> list[Rule]:
    """Rules of nftables, without the tables of iptables and firewalld.

    run: a function that returns what a command line prints.
    """
    # iptables keeps its rules in nft's tables as well, and shows them itself.
    skipped = {
        f"{family} {line[1:]}"
        for family, command in (("ip", "iptables-save"), ("ip6", "ip6tables-save"))
        for line in run(command).splitlines()
        if line.startswith("*")
    }
    tables: dict[str, dict[str, list[Line]]] = {}
    bases: dict[str, dict[str, str]] = {}
    chain = table = ""
    for line in map(str.strip, run("nft --stateless --handle list ruleset").splitlines()):
        if match := re.match(r"table (\S+ \S+) {", line):
            table, chain = match[1], ""
        elif match := re.match(r"chain (\S+) {", line):
            chain = match[1]
            tables.setdefault(table, {})[chain] = []
        elif chain and (match := re.match(r"type .* hook (\w+) ", line)):
            if match[1] in NFT_HOOKS:
                bases.setdefault(table, {})[chain] = NFT_HOOKS[match[1]]
            if "policy drop" in line:
                tables[table][chain].append(("policy drop", "policy drop", ""))
        elif chain and (match := re.fullmatch(r"(.*) # handle (\d+)", line)):
            remedy = f"sudo nft delete rule {table} {chain} handle {match[2]}"
            tables[table][chain].append((f"nft table {table}, chain {chain}: {match[1]}", match[1], remedy))
    return [
        rule
        for table, chains in tables.items()
        if table not in skipped and not table.endswith(" firewalld")
        for version in [{"ip": "4", "ip6": "6"}.get(table.split()[0], "")]
        for rule in passed("nft", f"nft table {table},", table, chains, bases.get(table, {}), version)
    ]


def iptables_rules(run: Run, _interface: str) -> list[Rule]:
    """Rules of iptables (IPv4) and ip6tables (IPv6), without the chains that ufw made.

    run: a function that returns what a command line prints.
    """
    found = []
    for command, version in (("iptables", "4"), ("ip6tables", "6")):
        for part in f"\n{run(f'{command}-save')}".split("\n*")[1:]:
            table, *lines = part.splitlines()
            written = command if table == "filter" else f"{command} -t {table}"
            chains: dict[str, list[Line]] = {}
            for line in lines:
                chain = line.removeprefix("-A ").removeprefix(":").partition(" ")[0]
                if chain.startswith("ufw"):
                    continue
                if line.startswith(f":{chain} DROP") and "-A INPUT -j ufw" not in part:
                    chains.setdefault(chain, []).append(("policy DROP", "policy drop", ""))
                elif line.startswith("-A "):
                    words = line.removeprefix(f"-A {chain} ")
                    for option, meaning in IPTABLES_AS_NFT:
                        words = re.sub(rf"(?<!\S){option}(?!\S)", meaning, words)
                    shown = (f"{written} {line}", words, f"sudo {written} -D {line[3:]}")
                    chains.setdefault(chain, []).append(shown)
            found += passed("iptables", written, table, chains, IPTABLES_CHAINS, version)
    return found


def passed(
    firewall: str,
    title: str,
    table: str,
    chains: Mapping[str, list[Line]],
    bases: Mapping[str, str],
    version: str,
) -> list[Rule]:
    """The rules of a table in its entry chains, and in the chains to which the entry chains jump.

    firewall: a key of FIREWALLS. title: the name of the table in `text` of a rule. table: its name in `place`
    of a rule. chains: {chain: lines of the chain, each as (text, conditions, command that deletes the line)}.
    bases: {entry chain: INPUT or OUTPUT}. version: 4 or 6 if the table is for one version of IP, else empty.
    """
    found = []
    for base in [each for each in bases if each in chains]:
        names = [base]
        for name in names:
            listed = "\n".join(tests for _text, tests, _remedy in chains[name])
            targets = dict.fromkeys(re.findall(r"\b(?:jump|goto) (\S+)", listed))
            names += [each for each in targets if each in chains and each not in names]
            for line in chains[name]:
                rule = read_rule(firewall, bases[base], f"{title} chain {name}", line, name == base)
                if rule:
                    found.append({**rule, "place": f"{table} {name}", "version": version})
    return found


def read_rule(firewall: str, chain: str, label: str, line: Line, is_base: bool) -> Rule | None:
    """One line of a chain as a rule; None if the line neither drops nor accepts new connections.

    A line that is not in an entry chain, or has conditions that a rule dict cannot hold, gives None if it
    accepts, and a rule without a remedy if it drops. firewall: a key of FIREWALLS. chain: INPUT or OUTPUT.
    label: the name of the chain, for messages. line: (text, conditions, command that deletes the line).
    is_base: whether the line is in an entry chain, where packets enter; if not, another chain jumps to its
    chain.
    """
    text, tests, remedy = line
    if tests == "policy drop":
        return make_rule(firewall, chain, "policy", f"{label} ({text})")
    tests = re.sub(r'\b(comment|prefix) "[^"]*"', "", tests)
    verdict = re.search(r"(?i)\b(drop|reject)\b", tests) or re.search(r"(?i)\baccept\b", tests)
    states = re.findall(r"ct state ({[^}]*}|\S+)", tests)
    if not verdict or not all(re.search(r"(?i)\bnew\b|!=|vmap", each) for each in states):
        return None
    tests = tests[: verdict.start()]
    end = "d" if chain == "OUTPUT" else "s"
    accepts = verdict[0].lower() == "accept"
    if not is_base or re.sub(KNOWN.replace("END", end), "", tests).strip():
        if accepts:
            return None
        remedy = ""
    protocols = re.findall(r"\b(?:tcp|udp|icmp\w*|sctp|igmp)\b", tests)
    given = {
        "protocol": "tcp" if "tcp" in protocols else "".join(protocols[:1]),
        "source": _after(tests, f"{end}addr"),
        "ports": _after(tests, "dport"),
        "length": _after(tests, "length"),
    }
    if accepts:
        return make_rule(firewall, chain, "accept", text, **given)
    if remedy and not any({**given, "protocol": given["protocol"].replace("tcp", "")}.values()):
        # A rule without conditions drops all that no other rule accepts: it is a policy, not to be deleted.
        return make_rule(firewall, chain, "policy", f"{label} ({text.removeprefix(f'{label}: ')})")
    return make_rule(firewall, chain, "drop", text, remedy=remedy, **given)


def _after(tests: str, word: str) -> str:
    match = re.search(rf"\b{word} ({{[^}}]*}}|[<>!=]* ?(?!@|vmap)\S+)", tests)
    return match[1].strip("{} ").replace(" ", "") if match else ""
