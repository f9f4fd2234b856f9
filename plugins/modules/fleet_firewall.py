"""Ansible module: make the ufw rules whose comment has one first word equal to a list; keep all others."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import ufw_rule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import matching

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
    """(ufw rules to add, ufw rules to delete) so that exactly the wanted rules of the fleet exist.

    present: {rule: comment} of all rules. wanted: rules. comment: that of the fleet's rules. A rule whose
    comment has the same first word and differs otherwise is added again, which changes its comment. The
    rule for SSH is kept.
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
    """Whether a rule with this comment was added for SSH when this module enabled ufw."""
    return is_ours(comment) and comment.endswith(" ssh")


def ssh_verdict(rules: list[str], controller: str, port: int) -> str:
    """What the first rule about the controller's SSH connection does: accept, drop, or "" without one.

    rules: arguments of ufw. controller: its address, "" if unknown. port: of SSH. A rule for one interface
    or one destination counts only if it drops. Any source matches an unknown controller.
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
    """The ufw rule that admits SSH, to add before ufw is enabled: (rule, whether it must be the first one).

    rules: arguments of ufw, in their order. controller: its address, "" if unknown. port: of SSH. The rule
    admits everybody if no rule is about SSH, else the controller.
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
    before = [rule for rule, found in present.items() if is_ours(found, mark_of(comment))]
    enabled_here = mark_of(comment) == "nanofleet" and any(of_ssh(found) for found in present.values())
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
