"""Print, as JSON, what this host's Python environment holds: compared across hosts before a run starts."""

import importlib.metadata
import json
import os
import platform
import sys

from trainer.config import code_digest

print(
    json.dumps(
        {
            "environment": os.path.basename(os.path.realpath(sys.prefix)),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "trainer": code_digest(),
        }
    )
)
