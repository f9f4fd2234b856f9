# SPDX-License-Identifier: MIT
"""The entry by which a host starts a transient unit again when it boots: a small enabled unit and its script.

    system   /etc/nanofleet/NAME.sh and nanofleet@NAME.service, root's
    user     ~/.config/nanofleet/NAME.sh and nanofleet@NAME.service of the user's own systemd

NAME is the unit's name without `nanofleet-`. The script runs a condition, a command, as the unit's user, with
one more argument: `boot`, or `end` when the unit has ended (its ExecStopPost). Exit status 1 removes the
entry; at a boot 0 starts the unit again, and any other leaves the entry for the next boot. Root executes
nothing that the unit's user can write. Standard library only. Used by transient_unit and run_state.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import manager, own_scope, run

PREFIX = "nanofleet-"
TEMPLATE = "nanofleet@.service"
UNIT = """\
# Written by nanofleet at the start of a run, removed with the last one.
[Unit]
Description=Start the nanofleet run %i again after a boot
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
at=${{1:-boot}}
{condition} "$at"
case $?-$at in
  0-boot) exec {start} ;;
  0-end) exit 0 ;;
  1-*) {disable}; rm -f {script}; rmdir {folder} 2>/dev/null && rm -f {template}; exit 0 ;;
  *) exit 1 ;;
esac
"""


def _folders(scope: str) -> tuple[str, str]:
    """Where the scripts and where the unit lie."""
    if scope == "system":
        return "/etc/nanofleet", "/etc/systemd/system"
    home = os.path.expanduser("~/.config")
    return f"{home}/nanofleet", f"{home}/systemd/user"


def _stem(name: str) -> str:
    return name.removesuffix(".service").removeprefix(PREFIX)


def instance(name: str) -> str:
    """The enabled unit's name."""
    return TEMPLATE.replace("@", f"@{_stem(name)}")


def entries(scope: str = "") -> list[str]:
    """The transient units, by full name, that this host starts again when it boots."""
    try:
        names = os.listdir(_folders(scope or own_scope())[0])
    except OSError:
        return []
    return sorted(f"{PREFIX}{name[:-3]}.service" for name in names if name.endswith(".sh"))


def script(name: str, start: Sequence[str], condition: Sequence[str], user: str, scope: str) -> str:
    """The text of the shell script that starts the unit again at a boot.

    start: the systemd-run command line. condition: a command that decides; in the scope `system` it runs as
    `user`. Its exit codes are explained at the top of this file.
    """
    folder, units = _folders(scope)
    asked = ["runuser", "-u", user, "--", *condition] if user and scope == "system" else condition
    control = ["systemctl", *manager(scope), "disable", instance(name)]
    return SCRIPT.format(
        condition=shlex.join(asked),
        start=shlex.join([start[0], "--no-block", *start[1:]]),
        disable=shlex.join(control),
        script=shlex.quote(f"{folder}/{_stem(name)}.sh"),
        folder=shlex.quote(folder),
        template=shlex.quote(f"{units}/{TEMPLATE}"),
    )


def stop_command(name: str, scope: str) -> str:
    """What the unit runs as ExecStopPost: its entry is removed if the unit is not wanted again."""
    script = shlex.quote(f"{_folders(scope)[0]}/{_stem(name)}.sh")
    return f"+-/bin/sh {script} end"  # as root in the system's systemd; the unit does not fail if this does


def write(name: str, start: Sequence[str], condition: Sequence[str], user: str, scope: str) -> None:
    """Write and enable the entry. Raises OSError, RuntimeError."""
    folder, units = _folders(scope)
    target = "multi-user.target" if scope == "system" else "default.target"
    write_whole(f"{folder}/{_stem(name)}.sh", script(name, start, condition, user, scope), 0o700)
    write_whole(f"{units}/{TEMPLATE}", UNIT.format(folder=folder, target=target))
    control = ["systemctl", *manager(scope)]
    run([*control, "daemon-reload"])
    code, _out, err = run([*control, "enable", instance(name)])
    if code:
        raise RuntimeError(f"{instance(name)} cannot be enabled: {err}")


def remove(name: str, scope: str) -> None:
    """Disable and remove the entry, and the template unit with the last one. Raises OSError."""
    folder, units = _folders(scope)
    run(["systemctl", *manager(scope), "disable", instance(name)])
    os.unlink(f"{folder}/{_stem(name)}.sh")
    if not os.listdir(folder):
        os.rmdir(folder)
        os.unlink(f"{units}/{TEMPLATE}")
        if scope == "user":
            with contextlib.suppress(OSError):
                os.removedirs(units)
        run(["systemctl", *manager(scope), "daemon-reload"])
