"""Findings of the doctor about the paths between hosts, made from the measurements (see doctor_measured).

If one fault causes others, only the fault that causes them is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_interfaces import (
    interface_findings,
    ports_of,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import Rule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import (
    FIREWALLS,
    lacking,
    matching,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wsl import hyperv_rule

Measured = Mapping[str, Mapping[str, Any]]
Ports = Sequence[Mapping[str, Any]]
Spans = Sequence[tuple[int, int]]
"""Ranges of ports (low, high)."""
SETUP = "ansible-playbook setup.yml"
SHOWN_RULES = 4
CLOSED = {
    "filtered": ("gets no answer from", ": packets are dropped on the way there or back"),
    "refused": ("is refused by", ", though a listener of nanofleet is there"),
    "unreachable": ("cannot reach", " ({detail})"),
}


def path_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """All findings about network interfaces, and about the paths between two hosts.

    measured: host -> its measurements (see doctor_measured). options: port_low, port_high, store_port,
    slow_rtt_ms (a path is slow if a round trip takes more milliseconds).
    """
    found = interface_findings(measured, options)
    explained = {each["host"] for each in found if each["severity"] == "error"}
    return found + connection_findings(measured, options, explained)


def connection_findings(
    measured: Measured, options: Mapping[str, Any], explained: Collection[str] = ()
) -> list[Finding]:
    """Findings about the connections that each host tried to each peer.

    measured: host -> its measurements (see doctor_measured). options: as for `path_findings`. explained:
    hosts whose problem another finding reports. Connections from and to them are left out, and those to peers
    that did not answer. Findings with the same code, host and remedy become one finding that lists the other
    paths, because one firewall rule may block many paths.
    """
    merged: dict[tuple[str, str, str], Finding] = {}
    others: dict[tuple[str, str, str], list[str]] = {}
    for host, of_host in measured.items():
        for peer in of_host["paths"]:
            if not measured[peer]["reachable"] or {host, peer} & set(explained):
                continue
            for each in Path(measured, host, peer, options).findings():
                key = (each["code"], each["host"], each["remedy"])
                if merged.setdefault(key, each) is not each:
                    others.setdefault(key, []).append(f"{host} to {peer}")
    for key, paths in others.items():
        merged[key]["problem"] += f" The same: {', '.join(paths)}."
    return list(merged.values())


# -- one path ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The path from `host` to `peer`: `host` has tried to connect to all ports of a run on `peer`.

    measured: host -> its measurements (see doctor_measured). options: as for `path_findings`.
    """

    measured: Measured
    host: str
    peer: str
    options: Mapping[str, Any]

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about this path."""
        host, peer, path = self.host, self.peer, self.measured[self.host]["paths"][self.peer]
        address, ports = self.measured[peer]["address"], path.get("ports") or []
        closed: dict[str, list[Mapping[str, Any]]] = {}
        for port in ports:
            if port["state"] != "open":
                closed.setdefault(port["state"], []).append(port)
        if "misrouted" in closed:
            other = closed["misrouted"][0]["detail"]
            problem = (
                f"When {host} connects to {address}, the address of {peer}, it reaches {other} instead. "
                "Two hosts have this address, or a firewall rule redirects the packets."
            )
            remedy = (
                f"type ip -br address on {peer} and on {other}: if both list {address}, give one of them "
                f"another address; else delete the rule on {host} that redirects {address}: sudo iptables "
                "-t nat -D RULE  (RULE: what follows -A in its line of: sudo iptables-save -t nat; other "
                "rules are listed by: sudo nft list ruleset)"
            )
            yield finding("NF522", peer, problem, remedy, host)
            return
        is_closed = ports and all(port["state"] != "open" for port in ports)
        spans = [(port["port"], port["port"]) for port in ports]
        is_explained = (
            self._is_mirrored()
            or self._dropping(ports)
            or self._dropping_answers()
            or any(
                lacking(rules, chain, end, spans) for _, chain, rules, end in self._ends("INPUT", "OUTPUT")
            )
        )
        if is_closed and not path.get("up") and not is_explained:
            problem = (
                f"{host} gets no answer from {address} at all, not even on the SSH port, while the "
                f"controller reaches {peer}: they are on different networks, or a router or a firewall "
                "between them drops all packets."
            )
            remedy = (
                f"connect both to one network, or set fleet_address of {peer} in the inventory to its "
                f"address on the network of {host}; to check: ip route get {address}  (on {host}). If both "
                "are on one network, turn off client isolation in its router or access point; in a cloud, "
                f"open the TCP ports {' and '.join(ports_of(self.options))} between them in its firewall"
            )
            yield finding("NF523", peer, problem, remedy, host)
            return
        for state, ports in closed.items():
            yield self._closed(state, ports)
        yield from self._packets(path)
        yield from self._warnings(path)

    def _closed(self, state: str, ports: Ports) -> Finding:
        """The finding about ports of the peer that are in the same state, which is not open."""
        host, peer, options = self.host, self.peer, self.options
        listeners = self._words(ports)
        of_ports = " or ".join(f"sport = :{port['port']}" for port in ports)
        address = self.measured[peer]["address"]
        back = (self.measured[peer]["paths"].get(host) or {}).get("ports") or []
        is_one_way = back and all(port["state"] == "open" for port in back)
        only = (
            f"Only connections from {host} to {peer} fail; connections from {peer} to {host} work. "
            if is_one_way
            else ""
        )
        if state == "silent":
            problem = (
                f"{only}{host} can connect to {peer} on {listeners} but receives no data. Either the program "
                "that listens there is frozen, or packets are lost."
            )
            see = (
                f"type sudo ss -Hltnp '{of_ports}'  (on {peer}). If it lists a program, end it: sudo kill -9 "
                f"PID  (on {peer}). If it lists none, packets are lost: check cable, WiFi and router; lost "
                f"packets are counted by: ping -c 100 {address}  (on {host})"
            )
            return finding("NF524", peer, problem, see, host)
        if state == "foreign":
            problem = (
                f"{only}Something other than nanofleet answers {host} on {listeners} of {peer}: a "
                "redirection (DNAT, a container), a proxy, or a machine with the same address."
            )
            see = (
                f"delete the redirection; redirections are listed by: sudo iptables-save -t nat  (on {peer} "
                f"and on {host}); a machine with the same address has another MAC address: compare ip neigh "
                f"show {address}  (on {host}) with ip -br link  (on {peer})"
            )
            return finding("NF525", peer, problem, see, host)
        fails_to_reach, how = CLOSED[state]
        reason = how.format(detail=ports[0]["detail"])
        what = f"{only}{host} {fails_to_reach} {peer} on {listeners}{reason}."
        wanted = [options["port_low"], options["port_high"]]
        has = self.measured[peer]["facts"].get("port_range")
        outside = [
            each for each in ports if each.get("picked") and not wanted[0] <= each["port"] <= wanted[1]
        ]
        if outside and has and has != wanted:
            low, high = has
            because = (
                f"The kernel of {peer} picks the ports of the ranks from {low} to {high}, but setup.yml "
                f"opens only {wanted[0]} to {wanted[1]}."
            )
            return finding("NF526", peer, f"{what} {because}", SETUP, host)
        where, cause, firewall_command = self._cause(ports)
        is_store = all(port["role"] == "store" for port in ports)
        other = host if where == peer else peer
        return finding("NF527" if is_store else "NF528", where, f"{what} {cause}", firewall_command, other)

    def _is_mirrored(self) -> bool:
        """Whether the peer runs in WSL2 with mirrored networking, where the firewall of Windows decides."""
        return bool(self.measured[self.peer]["facts"].get("wsl") == "mirrored")

    def _words(self, ports: Ports) -> str:
        """Ports of the peer as words for a message, such as "Gloo's ports 20000-20099"."""
        low, high, store = (self.options[name] for name in ("port_low", "port_high", "store_port"))
        gloo = sorted(port["port"] for port in ports if port["role"] == "gloo")
        words = [f"the rendezvous store's port {store}"] if len(gloo) < len(ports) else []
        if gloo and len(gloo) == sum(port["role"] == "gloo" for port in self.measured[self.peer]["ports"]):
            words.append(f"Gloo's ports {low}-{high}")
        elif gloo:
            words.append(f"Gloo's port{'s' if len(gloo) > 1 else ''} {', '.join(map(str, gloo))}")
        return " and ".join(words)

    # -- firewalls -------------------------------------------------------------------------------------------

    def _ends(self, *chains: str) -> Iterator[tuple[str, str, list[Rule], str]]:
        """Yield (host, chain, firewall rules of the host, address at the other end) of both ends.

        chains: the chain at the peer, which is the first end, and the chain at `host`.
        """
        ends = ((self.peer, self.host), (self.host, self.peer))
        for chain, (where, other) in zip(chains, ends, strict=True):
            yield where, chain, self.measured[where]["firewall"] or [], self.measured[other]["address"]

    def _cause(self, ports: Ports) -> tuple[str, str, str]:
        """(host to change, cause as a sentence, command to type) for ports that cannot be reached."""
        host, peer = self.host, self.peer
        if rule := self._dropping(ports):
            return _by_rule(rule)
        unread = [where for where in (peer, host) if self.measured[where]["firewall"] is None]
        if unread[:1] == [peer] and not self._is_mirrored():
            return self._unread(peer)
        spans = [(port["port"], port["port"]) for port in ports]
        for where, chain, rules, address in self._ends("INPUT", "OUTPUT"):
            for policy in lacking(rules, chain, address, spans):
                lacks = f"lets {host} in" if chain == "INPUT" else f"lets {host} reach {peer}"
                because = f"{policy['text']} is active on {where} and has no rule that {lacks}."
                return where, because, self._permission(policy, where, address, ports)
        if rule := self._dropping_answers():
            return _by_rule(rule)
        if self._is_mirrored():
            because = f"{peer} is WSL2, and the Hyper-V firewall of Windows admits no connection by default."
            return peer, because, f"in PowerShell as administrator: {hyperv_rule(ports_of(self.options))}"
        for where, chain, rules, address in self._ends("INPUT", "OUTPUT"):
            drops = matching(rules, "drop", chain, address, spans)
            if drops:
                drops.sort(key=lambda each: not (each["ports"] or each["source"]))
                texts = "; ".join(dict.fromkeys(each["text"] for each in drops[:SHOWN_RULES]))
                return (
                    where,
                    f"Firewall rules of {where} that may drop these packets: {texts}.",
                    f"delete the one that drops them; the rules are listed by: {_listing(drops[0], where)}",
                )
        if unread:
            return self._unread(unread[0])
        because = (
            f"No firewall rule of {host} or {peer} explains that: the cause may be a router or the "
            "firewall of a cloud."
        )
        return (
            peer,
            because,
            "in the router or the firewall of the cloud, open TCP ports "
            f"{' and '.join(ports_of(self.options))} between {host} and {peer}; the rules of the hosts are "
            f"listed by: sudo nft list ruleset  (on {peer}, then on {host})",
        )

    def _unread(self, where: str) -> tuple[str, str, str]:
        """The result of `_cause` if the rules of the host `where` could not be read."""
        return (
            where,
            f"Only root can read the firewall rules of {where}.",
            "repeat the command with -K, so that the doctor can read them; without sudo, let an "
            f"administrator open the TCP ports {' and '.join(ports_of(self.options))} between {self.host} "
            f"and {self.peer}: the rules are listed by: sudo nft list ruleset  (on {where})",
        )

    def _permission(self, policy: Rule, where: str, source: str, ports: Ports) -> str:
        """The fix for a firewall policy that drops the connections of this path, as text.

        For incoming packets it is the command that admits TCP from `source` to `ports`; for outgoing packets
        a text with the command that lists the rules. policy: a rule with the verdict policy. where: the host
        with this firewall. source: the address at the other end.
        """
        firewall = FIREWALLS[policy["firewall"]]
        if policy["chain"] == "OUTPUT":
            low, high, store = (self.options[name] for name in ("port_low", "port_high", "store_port"))
            return (
                f"add a rule for outgoing TCP to ports {low}-{high} and {store} of {source}; the rules are "
                f"listed by: {_listing(policy, where)}"
            )
        if firewall.is_managed:
            return SETUP
        low, high, store = (self.options[name] for name in ("port_low", "port_high", "store_port"))
        names = {"gloo": f"{low}:{high}", "store": str(store)}
        wanted = [
            {"source": source, "port": names[role]} for role in sorted({port["role"] for port in ports})
        ]
        return f"{' && '.join(firewall.permit(wanted, policy['place'], ''))}{firewall.keep}  (on {where})"

    def _dropping(self, ports: Ports) -> Rule | None:
        """The rule that by itself drops packets to these ports of the peer; None without one."""
        return self._dropping_all(("INPUT", "OUTPUT"), [[(port["port"], port["port"]) for port in ports]])

    def _dropping_answers(self) -> Rule | None:
        """The rule that by itself drops the answers of the peer to any ephemeral port of `host`, or None."""
        low, high = (self.measured[self.host]["facts"].get("port_range") or [0, 65535])[:2]
        return self._dropping_all(("OUTPUT", "INPUT"), [[(low, low)], [(high, high)]])

    def _dropping_all(self, chains: tuple[str, str], groups: Sequence[Spans]) -> Rule | None:
        """The first rule that by itself drops packets to each of `groups`; None if there is none.

        The rule has one more key, `where`: the name of its host. chains: as for `_ends`. groups: lists of
        ranges of ports (low, high).
        """
        for where, chain, rules, address in self._ends(*chains):
            for rule in rules:
                drops = all(matching([rule], "drop", chain, address, group) for group in groups)
                if drops and rule["remedy"]:
                    return {**rule, "where": where}
        return None

    # -- packets ---------------------------------------------------------------------------------------------

    def _packets(self, path: Mapping[str, Any]) -> Iterator[Finding]:
        """Findings about connections that break off and large packets that are lost without an error."""
        host, peer, mtu = self.host, self.peer, path.get("mtu") or {}
        count = (
            "check cable, WiFi and router; this command counts lost packets: ping -c 100 "
            f"{self.measured[peer]['address']}  (on {host})"
        )
        if path.get("cut"):
            problem = f"The test of the connection from {host} to {peer} broke off: {path['cut']}."
            yield finding("NF530", peer, problem, count, host)
        if not mtu.get("swallowed"):
            return
        arrive = f", those of {mtu['passes']} arrive" if mtu["passes"] else ""
        what = (
            f"Packets of {mtu['sent']} bytes from {host} to {peer} are lost without an error{arrive}: a run "
            "would connect and then hang."
        )
        for where, chain, rules, _address in self._ends("INPUT", "OUTPUT"):
            for rule in rules:
                if (rule["chain"], rule["verdict"]) == (chain, "drop") and rule["length"]:
                    _where, cause, firewall_command = _by_rule({**rule, "where": where})
                    other = host if where == peer else peer
                    yield finding("NF531", where, f"{what} {cause}", firewall_command, other)
                    return
        interface, small = self.measured[host]["interface"], mtu["passes"]
        because = f" A device between {host} and {peer} has a smaller MTU than {interface}." if small else ""
        lower = f"sudo ip link set {interface} mtu {small}  (on {host}, until that device is fixed)"
        yield finding("NF532", host, f"{what}{because}", lower if small else count, peer)

    def _warnings(self, path: Mapping[str, Any]) -> Iterator[Finding]:
        """Warnings about a path with an unexpected source address or a long round trip."""
        host, peer, own = self.host, self.peer, self.measured[self.host]["address"]
        address = self.measured[peer]["address"]
        seen = {port["seen"] for port in path.get("ports") or [] if port.get("seen")}
        if own and seen and own not in seen:
            problem = (
                f"{peer} receives packets of {host} from {', '.join(sorted(seen))}, not from {own}, the "
                f"address of {host}. A firewall rule on {peer} that allows {own} does not match them."
            )
            remedy = (
                f"type ip route get {address}  (on {host}); in the inventory, set fleet_interface of {host} "
                "to the interface that follows dev in its output, or fleet_address to the address that "
                "follows src; then: ansible-playbook setup.yml. If the address that follows src "
                f"is {own}, a router translates addresses (NAT): connect both to one network"
            )
            yield finding("NF533", host, problem, remedy, peer, "warning")
        # The shortest of all: a busy host answers late now and then, a distant one always.
        took = (path.get("rtt_ms") or {}).get("min", 0)
        if took > self.options["slow_rtt_ms"]:
            limit = self.options["slow_rtt_ms"]
            problem = (
                f"A packet from {host} to {peer} and back takes {took:.0f} ms; in a local network it takes "
                f"less than {limit:g} ms. Every step of a run waits for such packets."
            )
            remedy = (
                "connect both without a VPN and by cable, or turn off WiFi's power saving: sudo iw dev "
                "INTERFACE set power_save off  (on the host with WiFi; INTERFACE is listed by: iw dev); to "
                f"measure: ping -c 20 {address}  (on {host})"
            )
            yield finding("NF534", peer, problem, remedy, host, "warning")


def _by_rule(rule: Rule) -> tuple[str, str, str]:
    """(host to change, cause as a sentence, command to type) for a rule that drops packets."""
    where = rule["where"]
    remedy = (
        f"{rule['remedy']}  (on {where})"
        if rule["remedy"]
        else f"delete this rule; the rules are listed by: {_listing(rule, where)}"
    )
    return where, f"This firewall rule on {where} is the cause: {rule['text']}.", remedy


def _listing(rule: Rule, where: str) -> str:
    return f"sudo {FIREWALLS[rule['firewall']].listing}  (on {where})"
