"""Compares what host_state has read on all hosts with what setup.yml would make. Runs on the controller."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import (
    network_interfaces,
    network_rules,
    secret_file,
    ufw_rules,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import blocked_hosts
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import (
    runtime_findings,
    runtime_kind,
    runtime_summary,
)

State = Mapping[str, Any]
"""The result of host_state, with `tried`, the result of doctor_peers on the same host."""
TRAIN, TRACKER = "train", "tracker"
"""Names of the environments."""


@dataclass(frozen=True)
class Ports:
    """The ports of a run and of the tracker.

    low, high: the port range of a run. store: the port of the rendezvous store. tracker: the port of the
    MLflow server.
    """

    low: int
    high: int
    store: int
    tracker: int

    @property
    def valid(self) -> bool:
        """Whether the range has at least 100 ports and contains neither `store` nor `tracker`."""
        fixed = (self.store, self.tracker)
        return self.low + 99 <= self.high and not any(self.low <= port <= self.high for port in fixed)


@dataclass(frozen=True)
class Wanted:
    """The state that setup.yml would create.

    coordinator: name of the coordinator host. ports: of a run and of the tracker.
    comment: the text that marks the ufw rules of this fleet. enable: whether ufw is to be enabled.
    torch: {host: (build of torch, URL of its index)}. connections: {host: text of SSH_CONNECTION}.
    digests: {environment: {kind of host: SHA-256 of the lock file}}.
    tracker: the differences that the role tracker found, as phrases; None if it was not compared.
    """

    coordinator: str
    ports: Ports
    comment: str
    enable: bool
    torch: Mapping[str, tuple[str, str]]
    connections: Mapping[str, str]
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tracker: Sequence[str] | None = None


class Fleet:
    """The hosts of a fleet, and how they differ from the state that setup.yml would create.

    states: host -> result of host_state in rank order, with `tried`: the connections that the host tried.
    wanted: the state that setup.yml would create. Attributes:
    read: whether all hosts were read and listen for their peers.
    choices: host -> its interface and addresses (see network_interfaces.choose); {} if `read` is False.
    """

    def __init__(self, states: Mapping[str, State], wanted: Wanted) -> None:
        self.states, self.wanted = states, wanted
        self.hosts = list(states)
        self.read = all("listening" in state for state in states.values())
        self.choices: dict[str, dict[str, Any]] = {}
        if self.read:
            for host, state in states.items():
                seen = state["network"]
                self.choices[host] = network_interfaces.choose(host, seen["peers"], seen, seen["override"])

    def variables(self) -> dict[str, dict[str, Any]]:
        """{host: variables that the roles of setup.yml would set there}, for functions that take hostvars."""
        found = {}
        for host, state in self.states.items():
            choice = self.choices[host]
            found[host] = {
                "network_interface": choice["interface"],
                "network_address": choice["address"],
                "network_listen_address": choice["listen"],
                "network_networks": choice["networks"],
                "__network_filter": {"stdout": state["filter"]},
                "__network_ports": state["ports"],
                "__network_listening": state["listening"],
                "__network_tried": state["tried"],
            }
        return found

    def kind(self, host: str, torch: tuple[str, str]) -> dict[str, str]:
        """The kind of a host, a dict (see runtime_kind). torch: (build, index) of torch there."""
        state = self.states[host]
        return runtime_kind({"python": state["python"], "machine": state["machine"]}, *torch)

    def kinds(self) -> list[dict[str, str]]:
        """The kind of each host, for its training environment."""
        return [self.kind(host, self.wanted.torch[host]) for host in self.hosts]

    def fleet_addresses(self) -> list[str]:
        """The addresses that the hosts connect from."""
        peers = {host: choice["address"] for host, choice in self.choices.items()}
        return network_rules.sources(peers, self.variables())

    def rules(self, host: str) -> list[dict[str, str]]:
        """The connections that a host has to admit: [{"source", "port"}] (see network_rules.rules)."""
        ports, state = self.wanted.ports, self.states[host]
        return network_rules.rules(
            network_rules.sources(state["network"]["peers"], self.variables()),
            f"{ports.low}:{ports.high}",
            ports.store,
            ports.tracker,
            host == self.wanted.coordinator,
            [*state["controllers"], *self.wanted.connections.get(host, "").split()[:1]],
        )

    def measured(self) -> dict[str, Any]:
        """The connections that were tried between the hosts: the result of network_rules.measured."""
        ports = self.wanted.ports
        return network_rules.measured(self.hosts, self.variables(), ports.low, ports.high)

    # -- what differs ----------------------------------------------------------------------------------------

    def differences(self) -> list[str]:
        """A phrase with the host's name for each thing that setup.yml would change or refuse."""
        found = [
            f"{host}: {each}"
            for host, state in self.states.items()
            for each in state.get("differences") or []
        ]
        if not self.read:
            return found or [f"{host}: its state could not be read" for host in self._unread()]
        if not self.wanted.ports.valid:
            found.append("the range of ports cannot be used")
        blocked = set(blocked_hosts(self.measured()))
        for host in self.hosts:
            found += [f"{host}: {each}" for each in self._of_host(host, host in blocked)]
        secrets = {host: state["secret"] for host, state in self.states.items()}
        found += secret_file.phrases(secrets, self.wanted.coordinator)
        return found + [f"{each['host']}: {each['problem']}" for each in self.environment_findings()]

    def _unread(self) -> list[str]:
        return [host for host, state in self.states.items() if "listening" not in state]

    def _of_host(self, host: str, blocked: bool) -> Iterator[str]:
        state, wanted = self.states[host], self.wanted
        if self.choices[host]["problem"]:
            yield "no interface reaches all peers"
        yield from firewall_differences(state["firewall"], self.rules(host), wanted.comment, wanted.enable)
        if blocked or "peers" not in state["tried"]:
            yield "a connection between the hosts failed"
        for name, kind in self.environments(host).items():
            digest = wanted.digests.get(name, {}).get(kind["name"], "")
            yield from environment_differences(state["environments"].get(name) or {}, digest, name)
        if host == wanted.coordinator:
            yield from wanted.tracker or ()

    def environments(self, host: str) -> dict[str, dict[str, str]]:
        """{name: kind} of the environments that a host has to have.

        name: TRAIN, or on the coordinator also TRACKER. kind: the result of runtime_kind.
        """
        found = {TRAIN: self.kind(host, self.wanted.torch[host])}
        if host == self.wanted.coordinator and self.wanted.tracker is not None:
            found[TRACKER] = self.kind(host, ("cpu", ""))
        return found

    # -- what is reported ------------------------------------------------------------------------------------

    def installed(self, name: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """The arguments of runtime_findings and runtime_summary about the environment `name`.

        Returns (names of the hosts that have to have it, {host: variables as the role runtime would set
        them}).
        """
        variables = {}
        for host in self.hosts:
            kind = self.environments(host).get(name)
            if kind:
                checked = {**self.states[host]["environments"][name], "ready": True}
                variables[host] = {"runtime_checked": checked, "runtime_kind": kind}
        return list(variables), variables

    def environment_findings(self) -> list[Finding]:
        """Refusals about training environments that differ between the hosts."""
        return list(runtime_findings(*self.installed(TRAIN)))

    def report(self) -> list[str]:
        """The lines that setup.yml shows if nothing differs: findings, messages about ufw, environments."""
        variables, ports = self.variables(), self.wanted.ports
        connections = self.measured()
        findings: list[Finding] = []
        lines = []
        for host, state in self.states.items():
            options = {
                "port_low": ports.low,
                "port_high": ports.high,
                "store_port": ports.store,
                "is_root": True,
                "wanted": self.rules(host),
                "comment": self.wanted.comment,
            }
            findings += self.choices[host]["findings"]
            findings += network_interfaces.peer_findings(host, state["network"]["peers"], variables)
            findings += network_rules.findings(host, variables[host], connections, options)
            ssh_port = (self.wanted.connections.get(host, "").split() or ["22"])[-1]
            lines.append(
                network_rules.protection(host, state["firewall"]["status"], state["filter"], ssh_port)
            )
        summaries = [
            runtime_summary(*self.installed(name)) for name in (TRAIN, TRACKER) if self.installed(name)[0]
        ]
        return [*network_interfaces.lines(findings), *filter(None, lines), *summaries]


def firewall_differences(
    found: Mapping[str, str], rules: Sequence[Mapping[str, str]], comment: str, enable: bool
) -> Iterator[str]:
    """A phrase for each difference between ufw on a host and the state that setup.yml would create.

    found: {"status", "added"}, as host_state returns them. rules: [{"source", "port"}] to be admitted.
    comment: the text that marks the rules of this fleet. enable: whether ufw is to be enabled.
    """
    if found["status"] == "error":
        yield found["added"]
    elif found["status"] != "absent":
        texts = [ufw_rules.as_rule(rule["source"], rule["port"]) for rule in rules]
        add, delete = ufw_rules.plan(ufw_rules.parse_added(found["added"]), texts, comment)
        yield from (f"the ufw rule '{rule}' is missing" for rule in add)
        yield from (f"the ufw rule '{rule}' is not of this fleet" for rule in delete)
        if enable and found["status"] == "inactive":
            yield "ufw is not enabled"


def environment_differences(found: State, digest: str, name: str) -> Iterator[str]:
    """A phrase if an environment is not complete, or was not made from the lock file with this digest.

    found: the environment (see host_state.environment); {} if there is none. digest: SHA-256 of the lock
    file. name: the name of the environment.
    """
    if not (digest and found.get("linked") and found["name"] == digest[:12] and found["digest"] == digest):
        yield f"its environment ({name}) is not the one of this checkout"
    elif not found["complete"]:
        yield f"its environment ({name}) is not as it was installed"


def peers(states: Mapping[str, State], me: str) -> list[dict[str, Any]]:
    """The option `peers` of the module doctor_peers on the host `me`: a list with a dict for each other host.

    Keys: host, address, ports. states: {host: result of host_state}.
    """
    return [
        {"host": host, "address": state["address"], "ports": state["listening"]["ports"]}
        for host, state in states.items()
        if host != me
    ]


def tracker_differences(found: State, wanted: Mapping[str, Any]) -> list[str]:
    """A phrase for each difference between the tracker on its host and the wanted tracker.

    found: the value `tracker` in the result of host_state. wanted: dict with unit (text of the unit file),
    user, environment (name of the folder) and login (text of the file with the login; "" for none).
    """
    login = hashlib.sha256(wanted["login"].rstrip().encode()).hexdigest() if wanted["login"] else ""
    checks = {
        "its unit is another one": found["unit"].rstrip() == wanted["unit"].rstrip()
        and found["unit_mode"] == "0644",
        "its folder has another owner or mode": found["folder"] == {"owner": wanted["user"], "mode": "0750"},
        "its database is not upgraded": found["stamp"] == wanted["environment"],
        "its login is another one": found["login"] == login
        and found["login_mode"] == ("0600" if login else ""),
        "it is not enabled": found["enabled"],
        "it does not run": found["active"],
        "it does not answer": found["answers"],
    }
    return [f"the tracker: {phrase}" for phrase, good in checks.items() if not good]
