"""What tests of the collection's modules share."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[1]


def with_collection() -> dict[str, str]:
    """This process's environment, for a Python that imports the collection."""
    return {**os.environ, "PYTHONPATH": str(ROOT / ".ansible" / "collections")}


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
