"""What several of these modules are tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wheels


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a wheelhouse."""
    return wheels.make_house(tmp_path, monkeypatch)
