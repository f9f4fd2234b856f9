"""Ansible module: make the ufw rules that have a fleet's comment equal to a list; keep all other rules."""

from __future__ import annotations

import shlex
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.ufw_rules import (
    TIMER,
    as_rule,
    is_ours,
    mark_of,
    of_ssh,
    parse_added,
    plan,
    ssh_rule,
)


def timer_is_active() -> bool:
    """Whether the timer that disables ufw again is active."""
    return not subprocess.run(["systemctl", "--quiet", "is-active", f"{TIMER}.timer"], check=False).returncode


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
    # An earlier command may have enabled ufw and ended before it verified that the host can be reached.
    waiting = params["enable"] and active and not removing and timer_is_active()

    if not module.check_mode:
        if turn_off:
            run(ufw, "--force", "disable")
        # New rules go first, so that a general deny that a person has set does not hide them.
        for rule in add:
            # ufw changes the comment of an existing rule only if the command has no `prepend`.
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
        timer=f"{TIMER}.timer" if turn_on or waiting else "",
        diff={
            "before": "\n".join([f"ufw {was}", *sorted(before), ""]),
            "after": "\n".join([f"ufw {now}", *after, ""]),
        },
    )


if __name__ == "__main__":
    main()
