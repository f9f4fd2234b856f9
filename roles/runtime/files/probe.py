"""What an installation depends on, as one JSON line: the Python, the machine, who logs in, and rsync."""

import json
import os
import platform
import pwd
import shutil
import sys

version = f"{sys.version_info[0]}.{sys.version_info[1]}"
print(
    json.dumps(
        {
            "python": version,
            "machine": platform.machine(),
            "kind": version + "-" + platform.machine(),
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "rsync": shutil.which("rsync") is not None,
        }
    )
)
