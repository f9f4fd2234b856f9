# SPDX-License-Identifier: MIT
"""Compares the rules of ufw on a host with the rules that it should have. Pure functions."""

from __future__ import annotations

import contextlib
import ipaddress
import re

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import ufw_rule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import matching

TIMER = "nanofleet-ufw-rollback"
"""The unit that disables ufw again, unless a new SSH connection is seen in time (see fleet_firewall)."""
RULE = re.compile(r"^ufw (?P<words>.+?)(?: comment '(?P<comment>[^']*)')?$")


def parse_added(text: str) -> dict[str, str]:
    """{rule: comment} of the rules in the output of `ufw show added`, in their order. text: that output."""
    matches = [RULE.match(line.strip()) for line in text.splitlines()]
    return {match["words"]: match["comment"] or "" for match in matches if match}


def as_rule(source: str, port: str) -> str:
    """The arguments of ufw that allow TCP from `source` to `port`.

    A single address has no /32 or /128, as ufw prints it.
    """
    with contextlib.suppress(ValueError):
        source = str(ipaddress.ip_network(source)).removesuffix("/32").removesuffix("/128")
    return f"allow from {source} to any port {port} proto tcp"


def plan(present: dict[str, str], wanted: list[str], comment: str) -> tuple[list[str], list[str]]:
    """The changes after which a host has the rules `wanted`. Returns (rules to add, rules to delete).

    present: {rule: comment} of the rules on the host. wanted: the rules it should have. comment: the
    comment of the wanted rules. Only rules whose comment begins with the same word are changed or deleted. A
    wanted rule that has such a comment, but another than `comment`, is added again, because this changes its
    comment. The rule for SSH is not deleted.
    """
    mark = mark_of(comment)

    def lacks(rule: str) -> bool:
        found = present.get(rule)
        return found is None or (is_ours(found, mark) and found != comment)

    add = [rule for rule in dict.fromkeys(wanted) if lacks(rule)]
    delete = [
        rule
        for rule, found in present.items()
        if is_ours(found, mark) and not of_ssh(found) and rule not in wanted
    ]
    return add, delete


def mark_of(comment: str) -> str:
    """The first word of a comment: nanofleet for a fleet, nanofleet-serve for a model server."""
    return comment.partition(" ")[0]


def is_ours(comment: str, mark: str = "nanofleet") -> bool:
    """Whether the comment of a rule begins with the word `mark`."""
    return mark_of(comment) == mark


def of_ssh(comment: str) -> bool:
    """Whether a rule with this comment is for SSH, added by the module fleet_firewall when it enabled ufw."""
    return is_ours(comment) and comment.endswith(" ssh")


def ssh_verdict(rules: list[str], controller: str, port: int) -> str:
    """The verdict of the first rule that applies to SSH from the controller: accept or drop; "" if none does.

    rules: rules of ufw in their order, each as its words after `ufw`. controller: its address; if that is
    not known (""), the sources of the rules are ignored. port: the SSH port of this host. A rule for one
    interface or one destination counts only if it drops.
    """
    for line in rules:
        rule = ufw_rule(f"ufw {line}")
        if rule is None or (rule["verdict"] == "accept" and re.search(r" on | to (?!any\b)", line)):
            continue
        source = rule["source"] if controller else ""
        if matching([{**rule, "source": source}], rule["verdict"], "INPUT", controller, [(port, port)]):
            return rule["verdict"]
    return ""


def ssh_rule(rules: list[str], controller: str, port: int) -> tuple[str, bool]:
    """The rule that admits SSH, to add before ufw is enabled. Returns (rule, whether it must come first).

    If no rule is about SSH, or the controller is not known, the rule admits every address, else only the
    controller. Arguments: as for `ssh_verdict`.
    """
    verdict = ssh_verdict(rules, controller, port)
    narrow = [as_rule(controller, str(port)), f"allow from {controller} to any port {port}"]
    candidates = narrow if verdict and controller else [f"allow {port}/tcp", f"allow {port}"]
    return next((rule for rule in candidates if rule not in rules), candidates[0]), verdict == "drop"
