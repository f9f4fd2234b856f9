"""Plugins and modules of the roles, which are files and no package, for the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path, name: str = "") -> ModuleType:
    """The module of a file; named, so that others may import it, as Ansible's module_utils are."""
    spec = importlib.util.spec_from_file_location(name or f"tested_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
