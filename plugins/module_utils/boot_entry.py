# SPDX-License-Identifier: MIT
"""The boot entry of a transient unit: an enabled unit and a script that start this unit after a boot.

Their paths depend on the scope, which names the systemd that runs the transient unit:

    system   /etc/nanofleet/NAME.sh and nanofleet@NAME.service of the system's systemd, owned by root
    user     ~/.config/nanofleet/NAME.sh and nanofleet@NAME.service of the user's own systemd

The drop-in nanofleet-NAME.service.d/boot_entry.conf, in the folder of the unit files, holds the commands of
the transient unit with the prefix `+`, which root runs in the scope `system`. One runs the script when
the unit has ended. systemd 252 (Debian 12) loses such commands of a transient unit at a daemon-reload: it
writes ExecStopPostEx= into the unit, and does not know this setting when it reads the unit.

A unit that leaves its run while the host sleeps also has nanofleet.sleep@NAME.service, in the scope `system`
only: systemd stops the unit before the host sleeps, and starts it again when the host has woken.

NAME is the name of the transient unit without `nanofleet-`. The script runs a command, the condition, as the
unit's user, and appends one argument: `boot` after the host has booted or woken, `end` after the unit has
ended (ExecStopPost), `killed` if it has ended because SIGKILL ended a process of it. If the condition exits
with status 1, the script removes the boot entry. After a boot, status 0 starts the unit, and any other status
keeps the entry for the next boot. Root executes no file that the unit's user can write. Standard library
only. Used on the hosts, by the modules that start, stop, change or read a unit.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import PREFIX, run_of_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import manager, own_scope, run

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
DROP_IN = """\
# Written by nanofleet at the start of the run, removed with it.
[Service]
{commands}
"""
SLEEP_TEMPLATE = "nanofleet.sleep@.service"
SLEEP_UNIT = """\
# Written by nanofleet at the start of an elastic run, removed with the last one.
[Unit]
Description=Take this host out of the nanofleet run %i while it sleeps
Before=sleep.target
StopWhenUnneeded=yes

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh {folder}/%i.sh sleep
ExecStop=/bin/sh {folder}/%i.sh wake
TimeoutStartSec=90

[Install]
WantedBy=sleep.target
"""
SCRIPT = """\
#!/bin/sh
# Written by nanofleet at the start of the run, removed with it.
event=${{1:-boot}}
case $event in
  sleep) {is_active} || exit 0; : > {slept}; exec {stop} ;;
  wake) [ -e {slept} ] || exit 0; rm -f {slept}; event=boot ;;
  end) case $EXIT_STATUS in KILL|137) event=killed ;; esac ;;
esac
{condition} "$event"
case $?-$event in
  0-boot) {reset} 2>/dev/null; exec {start} ;;
  0-end|0-killed) exit 0 ;;
  1-*)
    {disable}; {disable_sleep} 2>/dev/null
    rm -rf {allowed} {drop_in}; rm -f {script}; rmdir {folder} 2>/dev/null && rm -f {templates}; exit 0 ;;
  *) exit 1 ;;
esac
"""


def _folders(scope: str) -> tuple[str, str]:
    """(folder of the scripts, folder of the unit files) of a scope, `system` or `user`."""
    if scope == "system":
        return "/etc/nanofleet", "/etc/systemd/system"
    home = os.path.expanduser("~/.config")
    return f"{home}/nanofleet", f"{home}/systemd/user"


def _allowed(name: str) -> str:
    """The folder in which systemd keeps the addresses that allow_addresses has added to a unit."""
    return f"/run/systemd/system.control/{PREFIX}{run_of_unit(name)}.service.d"


def _drop_in(name: str, scope: str) -> str:
    """The folder of the drop-in of the transient unit `name`."""
    return f"{_folders(scope)[1]}/{PREFIX}{run_of_unit(name)}.service.d"


def instance(name: str, template: str = TEMPLATE) -> str:
    """Name of the enabled unit in the boot entry of the transient unit `name`: nanofleet@NAME.service.

    template: the file name of the unit file from which systemd makes the enabled unit.
    """
    return template.replace("@", f"@{run_of_unit(name)}")


def entries(scope: str = "") -> list[str]:
    """Full names of the transient units that have a boot entry on this host.

    scope: system or user (see the top of this file); "" for own_scope().
    """
    scripts = Path(_folders(scope or own_scope())[0]).glob("*.sh")
    return sorted(f"{PREFIX}{each.stem}.service" for each in scripts)


def script(name: str, start: Sequence[str], condition: Sequence[str], user: str, scope: str) -> str:
    """The text of the shell script in a boot entry.

    name: the name of the transient unit. start: the systemd-run command line that starts it. condition: the
    command whose exit status decides whether the unit starts and whether the boot entry is kept (see the top
    of this file). user: the user as whom the condition runs in the scope `system`, "" for root; ignored in
    the scope `user`. scope: system or user.
    """
    folder, units = _folders(scope)
    command = ["runuser", "-u", user, "--", *condition] if user and scope == "system" else condition
    unit = f"{PREFIX}{run_of_unit(name)}.service"

    def systemctl(*arguments: str) -> str:
        return shlex.join(["systemctl", *manager(scope), *arguments])

    return SCRIPT.format(
        condition=shlex.join(command),
        is_active=systemctl("--quiet", "is-active", unit),
        stop=systemctl("stop", unit),
        slept=shlex.quote(f"/run/nanofleet.sleep.{run_of_unit(name)}"),
        reset=systemctl("reset-failed", unit),
        start=shlex.join([start[0], "--no-block", *start[1:]]),
        disable=systemctl("disable", instance(name)),
        disable_sleep=systemctl("disable", instance(name, SLEEP_TEMPLATE)),
        allowed=shlex.quote(_allowed(name)),
        drop_in=shlex.quote(_drop_in(name, scope)),
        script=shlex.quote(f"{folder}/{run_of_unit(name)}.sh"),
        folder=shlex.quote(folder),
        templates=shlex.join([f"{units}/{TEMPLATE}", f"{units}/{SLEEP_TEMPLATE}"]),
    )


def write(
    name: str,
    start: Sequence[str],
    condition: Sequence[str],
    user: str,
    scope: str,
    sleeps: bool = False,
    commands: Sequence[str] = (),
) -> None:
    """Write and enable the boot entry of the transient unit `name`.

    start, condition, user, scope: as for `script`. sleeps: whether the unit leaves its run while the host
    sleeps. commands: NAME=VALUE of further settings of the unit, such as ExecStartPost=+PROGRAM. Raises
    OSError if a file cannot be written, and RuntimeError if systemctl cannot enable the entry.
    """
    folder, units = _folders(scope)
    target = "multi-user.target" if scope == "system" else "default.target"
    path = f"{folder}/{run_of_unit(name)}.sh"
    write_whole(path, script(name, start, condition, user, scope), 0o700)
    # + for root; - because a script that fails, or is gone, is no failure of the unit.
    settings = [*commands, f"ExecStopPost=+-/bin/sh {shlex.quote(path)} end"]
    text = "\n".join(settings).replace("%", "%%")
    write_whole(f"{_drop_in(name, scope)}/boot_entry.conf", DROP_IN.format(commands=text))
    write_whole(f"{units}/{TEMPLATE}", UNIT.format(folder=folder, target=target))
    enabled = [instance(name)]
    if sleeps and scope == "system":
        write_whole(f"{units}/{SLEEP_TEMPLATE}", SLEEP_UNIT.format(folder=folder))
        enabled.append(instance(name, SLEEP_TEMPLATE))
    control = ["systemctl", *manager(scope)]
    run([*control, "daemon-reload"])
    code, _out, err = run([*control, "enable", *enabled])
    if code:
        raise RuntimeError(f"{' and '.join(enabled)} cannot be enabled: {err}")


def allow(name: str, addresses: Sequence[str], check: bool) -> list[str]:
    """Change a boot entry so that its unit may also exchange packets with `addresses` after a boot.

    Returns the addresses that the boot entry did not allow before; [] if there is no boot entry, or if the
    unit is not restricted to addresses. name: the name of a transient unit in the scope `system`. check:
    whether to change nothing. Raises OSError if the script cannot be read or written.
    """
    path, denied = Path(_folders("system")[0]) / f"{run_of_unit(name)}.sh", "--property=IPAddressDeny=any"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    words = {address: f"--property=IPAddressAllow={address}" for address in addresses}
    new = [address for address, word in words.items() if denied in text and word not in text.split()]
    if new and not check:
        more = shlex.join([denied, *(words[address] for address in new)])
        write_whole(str(path), text.replace(denied, more), 0o700)
    return new


def remove(name: str, scope: str) -> None:
    """Disable and delete the boot entry of the transient unit `name`.

    If no other boot entry is left in the scope, the unit files are deleted too. Raises OSError if a file
    cannot be deleted.
    """
    folder, units = _folders(scope)
    control = ["systemctl", *manager(scope)]
    run([*control, "disable", instance(name)])
    if os.path.exists(f"{units}/{SLEEP_TEMPLATE}"):
        run([*control, "disable", instance(name, SLEEP_TEMPLATE)])
    shutil.rmtree(_drop_in(name, scope), ignore_errors=True)
    if scope == "system":
        shutil.rmtree(_allowed(name), ignore_errors=True)
    os.unlink(f"{folder}/{run_of_unit(name)}.sh")  # last: without the script nobody looks for the others
    if not os.listdir(folder):
        os.rmdir(folder)
        os.unlink(f"{units}/{TEMPLATE}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{units}/{SLEEP_TEMPLATE}")
        if scope == "user":
            with contextlib.suppress(OSError):
                os.removedirs(units)
        run([*control, "daemon-reload"])
