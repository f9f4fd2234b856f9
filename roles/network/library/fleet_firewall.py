"""Make the ufw rules that carry our comment equal to the wanted ones; leave all other rules alone."""

from __future__ import annotations

import re
import shlex

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: fleet_firewall
short_description: Keep a set of ufw rules, found by their comment, equal to a list
description:
  - Adds the wanted rules that are missing, and deletes those with the same comment that are not wanted.
  - A wanted rule that a person has already set without the comment is left as it is, and stays his.
  - Rules can be set while ufw is inactive; it is enabled only if asked, after SSH's port is allowed.
options:
  rules:
    description: The wanted rules. Each lets one address reach a TCP port or a range of them.
    type: list
    elements: dict
    required: true
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
    description: The comment by which our rules are known.
    type: str
    default: nanofleet
  enable:
    description: Enable ufw if it is inactive.
    type: bool
    default: false
  ssh_port:
    description: The port of the SSH server, allowed before ufw is enabled.
    type: int
    default: 22
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Let the peer reach the ranks' ports
  fleet_firewall:
    rules:
      - source: 192.168.1.11
        port: "20000:20999"
"""

RETURN = r"""
status:
  description: State of ufw after the task.
  returned: always
  type: str
  choices: [active, inactive, absent]
rules:
  description: Our rules, one line each.
  returned: always
  type: list
  elements: str
"""

RULE = re.compile(
    r"^ufw allow from (?P<source>\S+) to any port (?P<port>[\d:]+) proto tcp(?: comment '(?P<comment>.*)')?$"
)


def parse_added(text: str) -> dict[tuple[str, str], str]:
    """{(source, port): comment} of the allow rules in `ufw show added` that have the form of ours."""
    found = {}
    for line in text.splitlines():
        match = RULE.match(line.strip())
        if match:
            found[match["source"], match["port"]] = match["comment"] or ""
    return found


def plan(
    present: dict[tuple[str, str], str], wanted: list[tuple[str, str]], comment: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(rules to add, rules to delete), each in a steady order."""
    add = [rule for rule in dict.fromkeys(wanted) if rule not in present]
    delete = [rule for rule, its_comment in present.items() if its_comment == comment and rule not in wanted]
    return add, delete


def allows_ssh(text: str, port: int) -> bool:
    """Whether a rule that admits everybody to SSH is among those of `ufw show added`."""
    services = {str(port), f"{port}/tcp", *(("OpenSSH", "SSH", "ssh", "ssh/tcp") if port == 22 else ())}
    rules = (line.split(" comment ")[0].split() for line in text.splitlines())
    return any(
        words[:1] == ["ufw"] and words[1:2] in (["allow"], ["limit"]) and words[2:] in ([s] for s in services)
        for words in rules
    )


def as_line(rule: tuple[str, str]) -> str:
    return f"allow from {rule[0]} to any port {rule[1]} proto tcp"


def ours(text: str, comment: str) -> list[str]:
    return sorted(as_line(rule) for rule, its_comment in parse_added(text).items() if its_comment == comment)


def main() -> None:
    rule_spec = {"source": {"type": "str", "required": True}, "port": {"type": "str", "required": True}}
    module = AnsibleModule(
        argument_spec={
            "rules": {"type": "list", "elements": "dict", "required": True, "options": rule_spec},
            "comment": {"type": "str", "default": "nanofleet"},
            "enable": {"type": "bool", "default": False},
            "ssh_port": {"type": "int", "default": 22},
        },
        supports_check_mode=True,
    )
    comment, enable = module.params["comment"], module.params["enable"]
    ufw = module.get_bin_path("ufw", opt_dirs=["/usr/sbin", "/sbin"])
    if ufw is None:
        module.exit_json(changed=False, status="absent", rules=[])

    def run(*words: str) -> str:
        command = [ufw, *words]
        code, out, error = module.run_command(command, environ_update={"LC_ALL": "C", "LANG": "C"})
        if code != 0:
            said = (error or out).strip()
            module.fail_json(msg=f"ufw refused. It said: {said}. The command was: {shlex.join(command)}")
        return out

    added = run("show", "added")
    active = "Status: active" in run("status")
    present = parse_added(added)
    wanted = [(rule["source"], rule["port"]) for rule in module.params["rules"]]
    add, delete = plan(present, wanted, comment)
    turn_on = enable and not active
    before = ours(added, comment)
    after = sorted({*before, *map(as_line, add)} - {*map(as_line, delete)})

    if not module.check_mode:
        # New rules go first, so that a general deny that a person has set does not hide them.
        for source, port in add:
            run(
                "prepend",
                "allow",
                "from",
                source,
                "to",
                "any",
                "port",
                port,
                "proto",
                "tcp",
                "comment",
                comment,
            )
        for rule in delete:
            run("delete", *as_line(rule).split())
        if turn_on:
            if not allows_ssh(added, module.params["ssh_port"]):
                run("allow", f"{module.params['ssh_port']}/tcp", "comment", f"{comment} ssh")
            run("--force", "enable")

    def shown(lines: list[str], is_active: bool) -> str:
        return "\n".join([f"ufw {'active' if is_active else 'inactive'}", *lines]) + "\n"

    module.exit_json(
        changed=bool(add or delete or turn_on),
        status="active" if active or turn_on else "inactive",
        rules=after,
        diff={"before": shown(before, active), "after": shown(after, active or turn_on)},
    )


if __name__ == "__main__":
    main()
