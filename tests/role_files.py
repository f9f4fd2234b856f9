"""Plugins and modules of the roles, which are files and no package, for the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args


def load(path: Path, name: str = "") -> ModuleType:
    """The module of a file; named, so that others may import it, as Ansible's module_utils are."""
    spec = importlib.util.spec_from_file_location(name or f"tested_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class LeftError(Exception):
    """What a module returned."""


def call(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, check: bool = False, **params: Any
) -> dict[str, Any]:
    """Run an Ansible module in this process; the result has `failed` set when it failed."""

    def leave(failed: bool) -> Any:
        def end(_self: Any, **result: Any) -> None:
            raise LeftError({"failed": failed, **result})

        return end

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave(False))
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", leave(True))
    with patch_module_args({**params, "_ansible_check_mode": check}), pytest.raises(LeftError) as left:
        module.main()
    result: dict[str, Any] = left.value.args[0]
    return result
