#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: let an active unit exchange packets with more addresses, also after a boot."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import own_scope, run, unit_name

PROPERTY = "IPAddressAllow"


def missing(shown: str, addresses: list[str]) -> list[str]:
    """Those of `addresses` that a unit may not exchange packets with yet; localhost is left out.

    shown: the value of IPAddressAllow, as systemctl show prints it.
    """
    allowed = {network.removesuffix("/32").removesuffix("/128") for network in shown.split()}
    return [each for each in addresses if each != "localhost" and each not in allowed]


def allow(name: str, addresses: list[str], check: bool) -> list[str]:
    """Let the unit `name` exchange packets with `addresses`; returns those that were not allowed before.

    The addresses are added to the active unit, and to its boot entry, the script that starts the unit after a
    boot. For a unit that is not active, as on a host that has left its run, only the boot entry changes. A
    unit of `systemd --user` has no such restriction, so the result is []. check: change nothing. Raises
    OSError if the boot entry cannot be read or written, RuntimeError if systemctl fails.
    """
    if own_scope() == "user":
        return []
    code, shown, err = run(["systemctl", "show", "--value", f"--property={PROPERTY}", "--", name])
    if code:
        raise RuntimeError(err or "systemctl show failed")
    at_boot = boot_entry.allow(name, addresses, check)
    new = missing(shown, addresses) if shown.strip() else []
    if new and not check:
        values = [f"{PROPERTY}={address}" for address in new]
        code, _out, err = run(["systemctl", "set-property", "--runtime", "--", name, *values])
        if code:
            raise RuntimeError(err or "systemctl set-property failed")
    return list(dict.fromkeys([*new, *at_boot]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "addresses": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    name, addresses = unit_name(module.params["name"]), module.params["addresses"]
    try:
        new = allow(name, addresses, module.check_mode)
    except (OSError, RuntimeError) as error:
        about = f"The unit {name} could not be allowed to communicate with the added hosts ({PROPERTY}=)"
        module.fail_json(msg=f"{about}: {error}")
    module.exit_json(changed=bool(new), allowed=new)


if __name__ == "__main__":
    main()
