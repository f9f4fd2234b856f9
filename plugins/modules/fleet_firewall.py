"""Make the ufw rules that carry our comment equal to the wanted ones; leave all other rules alone."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: fleet_firewall
short_description: Keep a set of ufw rules, found by their comment, equal to a list
description:
  - Adds the wanted rules that are missing, and deletes those of ours that are not wanted.
  - Every rule whose comment begins with the word C(nanofleet) is ours; one with another such comment gets
    O(comment).
  - A wanted rule that a person has already set without the comment is left as it is, and stays his.
  - Rules can be set while ufw is inactive. It is enabled only if asked, once a rule lets the controller's SSH
    in, and with a timer that disables it again; whoever asked stops the timer once a new connection came in.
  - The rule added for SSH carries the comment with C(ssh) after it, the sign that ufw was enabled here.
options:
  state:
    description: With V(absent) all our rules go, and ufw is disabled first if it was enabled here.
    type: str
    choices: [present, absent]
    default: present
  rules:
    description: The wanted rules. Each lets one address reach a TCP port or a range of them.
    type: list
    elements: dict
    default: []
    suboptions:
      source:
        description: Address or network that may connect.
        type: str
        required: true
      port:
        description: A port, or a range as LOW:HIGH.
        type: str
        required: true
  comment:
    description: The comment of our rules, which begins with the word C(nanofleet).
    type: str
    default: nanofleet
  enable:
    description: Enable ufw if it is inactive.
    type: bool
    default: false
  controller:
    description: The controller's address as this host's SSH server sees it; empty if it is not known.
    type: str
    default: ""
  ssh_port:
    description: The port of the SSH server.
    type: int
    default: 22
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
rules: {description: "Our rules, one line each.", type: list, elements: str, returned: always}
removed: {description: "What was removed, one line each.", type: list, elements: str, returned: always}
timer: {description: "Timer that disables ufw unless it is stopped, or empty.", type: str, returned: always}
"""

TIMER = "nanofleet-ufw-rollback"
RULE = re.compile(r"^ufw (?P<words>.+?)(?: comment '(?P<comment>[^']*)')?$")
SERVICES = {"ssh": 22, "SSH": 22, "OpenSSH": 22}
"""Names that stand for SSH's port: of the service and of ufw's profiles."""


def parse_added(text: str) -> dict[str, str]:
    """{rule: comment} of the lines of `ufw show added`, in their order."""
    matches = [RULE.match(line.strip()) for line in text.splitlines()]
    return {match["words"]: match["comment"] or "" for match in matches if match}


def as_rule(source: str, port: str) -> str:
    """A wanted rule in ufw's words; addresses as ufw writes them."""
    with contextlib.suppress(ValueError):
        source = str(ipaddress.ip_network(source)).removesuffix("/32").removesuffix("/128")
    return f"allow from {source} to any port {port} proto tcp"


def plan(present: dict[str, str], wanted: list[str], comment: str) -> tuple[list[str], list[str]]:
    """(rules to add, rules to delete), each in a steady order."""

    def lacks(rule: str) -> bool:
        its = present.get(rule)
        return its is None or (is_ours(its) and its != comment)

    add = [rule for rule in dict.fromkeys(wanted) if lacks(rule)]
    delete = [
        rule for rule, its in present.items() if is_ours(its) and not of_ssh(its) and rule not in wanted
    ]
    return add, delete


def is_ours(comment: str) -> bool:
    """Whether a rule's comment marks it as one of a fleet."""
    return comment.partition(" ")[0] == "nanofleet"


def of_ssh(comment: str) -> bool:
    """Whether it marks the rule that was added for SSH, when ufw was enabled here."""
    return is_ours(comment) and comment.endswith(" ssh")


def ports_hold(text: str, port: int) -> bool:
    """Whether `22`, `22/tcp`, `20:30,2222/tcp` or a profile's name stands for this TCP port."""
    text, _, protocol = text.partition("/")
    if protocol not in ("", "tcp"):
        return False
    if text in SERVICES:
        return SERVICES[text] == port
    for part in text.split(","):
        low, _, high = part.partition(":")
        if low.isdigit() and int(low) <= port <= int(high or low):
            return True
    return False


def ssh_verdict(rules: list[str], controller: str, port: int) -> str:
    """What the first rule that speaks of this connection decides: allow, deny, or nothing.

    A rule that cannot be read for sure (of one interface, or to one address) counts only where it denies.
    """
    for rule in rules:
        words = shlex.split(rule)
        action = {"limit": "allow", "reject": "deny"}.get(words[0], words[0])
        words = [word for word in words[1:] if word not in ("in", "log", "log-all")]
        if action not in ("allow", "deny") or "out" in words[:1]:
            continue
        sure, source, wanted = True, "any", "any"
        if len(words) == 1:
            wanted = words[0]
        else:
            for name, value in zip(words[::2], words[1::2], strict=False):
                if name == "from":
                    source = value
                elif name in ("port", "app"):
                    wanted = value
                elif name == "proto":
                    wanted = wanted if value in ("tcp", "any") else "0"
                elif name in ("on", "to") and value != "any":
                    sure = False
        speaks = (wanted == "any" or ports_hold(wanted, port)) and comes_from(controller, source)
        if speaks and (sure or action == "deny"):
            return action
    return ""


def comes_from(address: str, source: str) -> bool:
    """Whether an address is in a rule's source; one that is not known is in every."""
    if source == "any" or not address:
        return True
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(source, strict=False)
    except ValueError:
        return True


def ssh_rule(rules: list[str], controller: str, port: int) -> tuple[str, bool]:
    """(the rule to add before ufw is enabled, whether it must stand before all others).

    Where nothing speaks of SSH everybody may come, as before; where a rule does, the controller is added.
    """
    verdict = ssh_verdict(rules, controller, port)
    narrow = [as_rule(controller, str(port)), f"allow from {controller} to any port {port}"]
    candidates = narrow if verdict and controller else [f"allow {port}/tcp", f"allow {port}"]
    return next((rule for rule in candidates if rule not in rules), candidates[0]), verdict == "deny"


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
                    ". Type there: sudo sed -i s/^IPV6=.*/IPV6=yes/ /etc/default/ufw && sudo ufw reload"
                )
            module.fail_json(msg=f"{shlex.join(command)} failed: {printed}")
        return out

    present = parse_added(run(ufw, "show", "added"))
    active = "Status: active" in run(ufw, "status")
    was = "active" if active else "inactive"
    before = [rule for rule, its in present.items() if is_ours(its)]
    enabled_here = any(of_ssh(its) for its in present.values())
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
