"""Where relative paths of settings begin on the controller. Used on the controller only."""

from __future__ import annotations

import os
from pathlib import Path


def project_folder(playbook_dir: str) -> str:
    """The checkout that a playbook is in; for one of an installed collection, where the command is typed."""
    folder = Path(playbook_dir)
    if "ansible_collections" in folder.parts:
        return os.environ.get("PWD") or os.getcwd()
    return str(folder.parent)
