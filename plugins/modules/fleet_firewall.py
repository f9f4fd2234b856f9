"""Ansible module: make the ufw rules with the fleet's comment equal to a list; keep all other rules."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import ufw_rule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import matching

DOCUMENTATION = r"""
module: fleet_firewall
short_description: Make the ufw rules with the fleet's comment equal to a list
description:
  - Adds the rules of O(rules) that are missing, and deletes the fleet's rules that are not in O(rules).
  - Rules whose comment begins with the word C(nanofleet) are the fleet's. One with another such comment gets
    O(comment).
  - A rule of O(rules) that exists without such a comment stays unchanged; reset.yml does not remove it.
  - Rules can be set while ufw is inactive. With O(enable) a rule that admits the controller's SSH is added,
    a timer is started that disables ufw again, and ufw is enabled. The caller stops the timer after a new
    SSH connection has succeeded.
  - The comment of the rule for SSH ends with C(ssh). It marks that this module has enabled ufw.
options:
  state:
    description: V(absent) deletes all rules of the fleet. It first disables ufw if this module enabled it.
    type: str
    choices: [present, absent]
    default: present
  rules:
    description: The rules to have. Each admits one address to a TCP port or a range of ports.
    type: list
    elements: dict
    default: []
    suboptions:
      source: {description: Address or network that may connect., type: str, required: true}
      port: {description: "A port, or a range as LOW:HIGH.", type: str, required: true}
  comment:
    description: The comment of the fleet's rules, which begins with the word C(nanofleet).
    type: str
    default: nanofleet
  enable: {description: Enable ufw if it is inactive., type: bool, default: false}
  controller:
    description: The controller's address as this host's SSH server sees it; empty if unknown.
    type: str
    default: ""
  ssh_port: {description: The port of the SSH server., type: int, default: 22}
  rollback_seconds:
    description: Seconds after which the timer disables ufw again, unless it is stopped.
    type: int
    default: 60
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Let the peer reach the ranks' ports
  nanofleet.fleet.fleet_firewall:
    rules:
      - source: 192.168.1.11
        port: "20000:20999"
"""

RETURN = r"""
status: {description: "State of ufw after the task: active, inactive or absent.", type: str, returned: always}
rules: {description: "The rules of the fleet, one line each.", type: list, elements: str, returned: always}
removed: {description: "Deleted rules, one line each.", type: list, elements: str, returned: always}
timer: {description: "Timer that disables ufw unless it is stopped, or empty.", type: str, returned: always}
"""

TIMER = "nanofleet-ufw-rollback"
RULE = re.compile(r"^ufw (?P<words>.+?)(?: comment '(?P<comment>[^']*)')?$")


def parse_added(text: str) -> dict[str, str]:
    """{rule: comment} of the lines of `ufw show added`, in their order."""
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
    """(rules to add, rules to delete), in a stable order. present: {rule: comment}.

    A rule of a fleet with another comment is added again, which changes its comment. The rule for SSH is
    kept.
    """

    def lacks(rule: str) -> bool:
        found = present.get(rule)
        return found is None or (is_ours(found) and found != comment)

    add = [rule for rule in dict.fromkeys(wanted) if lacks(rule)]
    delete = [
        rule for rule, found in present.items() if is_ours(found) and not of_ssh(found) and rule not in wanted
    ]
    return add, delete


def is_ours(comment: str) -> bool:
    """Whether a rule with this comment belongs to a fleet: the first word is nanofleet."""
    return comment.partition(" ")[0] == "nanofleet"


def of_ssh(comment: str) -> bool:
    """Whether a rule with this comment was added for SSH when this module enabled ufw."""
    return is_ours(comment) and comment.endswith(" ssh")


def ssh_verdict(rules: list[str], controller: str, port: int) -> str:
    """Verdict of the first rule about the controller's SSH connection: accept, drop, or "" without one.

    A rule for one interface or one destination counts only if it drops. Any source matches an unknown
    controller ("").
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
    """(rule that admits SSH, to add before ufw is enabled; whether it must come before all other rules).

    It admits everybody if no rule is about SSH, else the controller.
    """
    verdict = ssh_verdict(rules, controller, port)
    narrow = [as_rule(controller, str(port)), f"allow from {controller} to any port {port}"]
    candidates = narrow if verdict and controller else [f"allow {port}/tcp", f"allow {port}"]
    return next((rule for rule in candidates if rule not in rules), candidates[0]), verdict == "drop"


def main() -> None:
    rule_spec = {"source": {"type": "str", "required": True}, "port": {"type": "str", "required": True}}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "rules": {"type": "list", "elements": "dict", "default": [], "options": rule_spec},
            "comment": {"type": "str", "default": "nanofleet"},
            "enable": {"type": "bool", "default": False},
            "controller": {"type": "str", "default": ""},
            "ssh_port": {"type": "int", "default": 22},
            "rollback_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    params, comment = module.params, module.params["comment"]
    ufw = module.get_bin_path("ufw", opt_dirs=["/usr/sbin", "/sbin"])
    if ufw is None:
        module.exit_json(changed=False, status="absent", rules=[], removed=[], timer="")

    def run(*command: str) -> str:
        code, out, error = module.run_command(list(command), environ_update={"LC_ALL": "C", "LANG": "C"})
        if code != 0:
            printed = (error or out).strip()
            if "IPv6 support not enabled" in printed:
                printed += (
                    ". Type on it: sudo sed -i s/^IPV6=.*/IPV6=yes/ /etc/default/ufw && sudo ufw reload"
                )
            module.fail_json(msg=f"{shlex.join(command)} failed: {printed}")
        return out

    present = parse_added(run(ufw, "show", "added"))
    active = "Status: active" in run(ufw, "status")
    was = "active" if active else "inactive"
    before = [rule for rule, found in present.items() if is_ours(found)]
    enabled_here = any(of_ssh(found) for found in present.values())
    removing = params["state"] == "absent"
    if removing:
        add, delete = list[str](), before
    else:
        add, delete = plan(present, [as_rule(r["source"], r["port"]) for r in params["rules"]], comment)
    turn_on = params["enable"] and not active and not removing
    turn_off = removing and active and enabled_here

    if not module.check_mode:
        if turn_off:
            run(ufw, "--force", "disable")
        # New rules go first, so that a general deny that a person has set does not hide them.
        for rule in add:
            # ufw changes the comment of a rule that is there only where its place is not given.
            place = [] if rule in present else ["prepend"]
            run(ufw, *place, *rule.split(), "comment", comment)
        for rule in delete:
            run(ufw, "delete", *shlex.split(rule))
        if turn_on:
            others = [rule for rule in present if rule not in before]
            rule, first = ssh_rule(others, params["controller"], params["ssh_port"])
            run(ufw, *(["prepend"] if first else []), *rule.split(), "comment", f"{comment} ssh")
            delay = f"--on-active={params['rollback_seconds']}"
            run("systemd-run", "--quiet", "--collect", delay, f"--unit={TIMER}", ufw, "disable")
            run(ufw, "--force", "enable")

    after = sorted({*before, *add} - {*delete})
    now = "inactive" if turn_off else "active" if turn_on else was
    module.exit_json(
        changed=bool(add or delete or turn_on or turn_off),
        status=now,
        rules=after,
        removed=[*(["ufw, which setup.yml enabled, is disabled"] if turn_off else []), *delete],
        timer=f"{TIMER}.timer" if turn_on else "",
        diff={
            "before": "\n".join([f"ufw {was}", *sorted(before), ""]),
            "after": "\n".join([f"ufw {now}", *after, ""]),
        },
    )


if __name__ == "__main__":
    main()
