"""What an installation depends on, as one JSON line: Python, machine, who logs in, the service user.

On the command line: the service user; folders to look at.
"""

import json
import os
import platform
import pwd
import shutil
import stat
import sys


def account(name):
    """Description, home and shell of a user; None where there is no such user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"comment": entry.pw_gecos, "home": entry.pw_dir, "shell": entry.pw_shell}


def folder(path):
    """Whose it is and its mode; None where there is no such folder."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    return {"owner": owner, "mode": f"{stat.S_IMODE(status.st_mode):04o}"}


user, *folders = sys.argv[1:]
print(
    json.dumps(
        {
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
            "machine": platform.machine(),
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "rsync": shutil.which("rsync") is not None,
            "account": account(user),
            "folders": {path: found for path in folders if (found := folder(path))},
        }
    )
)
