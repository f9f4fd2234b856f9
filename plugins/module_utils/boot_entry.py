# SPDX-License-Identifier: MIT
"""The boot entry of a transient unit: an enabled unit and a script that start it after a boot.

    system   /etc/nanofleet/NAME.sh and nanofleet@NAME.service, root's
    user     ~/.config/nanofleet/NAME.sh and nanofleet@NAME.service of the user's own systemd

NAME is the name of the transient unit without `nanofleet-`. The script runs the condition, a command, as the
unit's user and appends one argument: `boot` after a boot, `end` when the unit has ended (its ExecStopPost).
Exit status 1 removes the entry. After a boot, 0 starts the unit and any other status keeps the entry for the
next boot. Root executes no file that the unit's user can write. Standard library only. Used by transient_unit
and run_state.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import run_of_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import manager, own_scope, run

PREFIX = "nanofleet-"
TEMPLATE = "nanofleet@.service"
UNIT = """\
# Written by nanofleet at the start of a run, removed with the last one.
[Unit]
Description=Restart the nanofleet run %i after a boot
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
ExecStart=/bin/sh {folder}/%i.sh

[Install]
WantedBy={target}
"""
SCRIPT = """\
#!/bin/sh
# Written by nanofleet at the start of the run, removed with it.
event=${{1:-boot}}
{condition} "$event"
case $?-$event in
  0-boot) {reset} 2>/dev/null; exec {start} ;;
  0-end) exit 0 ;;
  1-*) {disable}; rm -f {script}; rmdir {folder} 2>/dev/null && rm -f {template}; exit 0 ;;
  *) exit 1 ;;
esac
"""


def _folders(scope: str) -> tuple[str, str]:
    """(folder of the scripts, folder of the unit files) of a scope, `system` or `user`."""
    if scope == "system":
        return "/etc/nanofleet", "/etc/systemd/system"
    home = os.path.expanduser("~/.config")
    return f"{home}/nanofleet", f"{home}/systemd/user"


def instance(name: str) -> str:
    """Name of the enabled unit in the boot entry of the transient unit `name`: nanofleet@NAME.service."""
    return TEMPLATE.replace("@", f"@{run_of_unit(name)}")


def entries(scope: str = "") -> list[str]:
    """Full names of the transient units that have a boot entry on this host. scope: "" for own_scope()."""
    scripts = Path(_folders(scope or own_scope())[0]).glob("*.sh")
    return sorted(f"{PREFIX}{each.stem}.service" for each in scripts)


def script(name: str, start: Sequence[str], condition: Sequence[str], user: str, scope: str) -> str:
    """The text of the shell script in a boot entry.

    start: the systemd-run command line of the unit. condition: the command whose exit status decides (see the
    top of this file); in the scope `system` it runs as `user`.
    """
    folder, units = _folders(scope)
    command = ["runuser", "-u", user, "--", *condition] if user and scope == "system" else condition
    control = ["systemctl", *manager(scope), "disable", instance(name)]
    return SCRIPT.format(
        condition=shlex.join(command),
        reset=shlex.join(
            ["systemctl", *manager(scope), "reset-failed", f"{PREFIX}{run_of_unit(name)}.service"]
        ),
        start=shlex.join([start[0], "--no-block", *start[1:]]),
        disable=shlex.join(control),
        script=shlex.quote(f"{folder}/{run_of_unit(name)}.sh"),
        folder=shlex.quote(folder),
        template=shlex.quote(f"{units}/{TEMPLATE}"),
    )


def stop_command(name: str, scope: str) -> str:
    """The ExecStopPost= of the transient unit: it runs the script of the boot entry with `end`."""
    script = shlex.quote(f"{_folders(scope)[0]}/{run_of_unit(name)}.sh")
    return f"+-/bin/sh {script} end"  # as root in the system's systemd; the unit does not fail if this does


def write(name: str, start: Sequence[str], condition: Sequence[str], user: str, scope: str) -> None:
    """Write and enable the boot entry of the unit `name`. Raises OSError; RuntimeError if systemctl fails."""
    folder, units = _folders(scope)
    target = "multi-user.target" if scope == "system" else "default.target"
    write_whole(f"{folder}/{run_of_unit(name)}.sh", script(name, start, condition, user, scope), 0o700)
    write_whole(f"{units}/{TEMPLATE}", UNIT.format(folder=folder, target=target))
    control = ["systemctl", *manager(scope)]
    run([*control, "daemon-reload"])
    code, _out, err = run([*control, "enable", instance(name)])
    if code:
        raise RuntimeError(f"{instance(name)} cannot be enabled: {err}")


def remove(name: str, scope: str) -> None:
    """Disable and delete the boot entry of `name`, and with the last entry the template. Raises OSError."""
    folder, units = _folders(scope)
    run(["systemctl", *manager(scope), "disable", instance(name)])
    os.unlink(f"{folder}/{run_of_unit(name)}.sh")
    if not os.listdir(folder):
        os.rmdir(folder)
        os.unlink(f"{units}/{TEMPLATE}")
        if scope == "user":
            with contextlib.suppress(OSError):
                os.removedirs(units)
        run(["systemctl", *manager(scope), "daemon-reload"])
