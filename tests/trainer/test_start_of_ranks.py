"""What a rank imports until its run ends: the parts of torch that take seconds are not among it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Rank, Start

SLOW_IMPORTS = {"torch._dynamo", "torch._inductor", "sympy"}  # 3 s and 100 MB in each rank


@pytest.mark.parametrize("sync", ["exact", "local"])
def test_a_rank_imports_no_compiler(start: Start, sync: str) -> None:
    ranks = start(2, sync=sync, save_every=3, eval_every=3, env=[{"PYTHONPROFILEIMPORTTIME": "1"}] * 2)
    with ThreadPoolExecutor() as pool:  # a full pipe would stop the second rank
        ends = list(pool.map(Rank.wait, ranks))
    for code, output in ends:
        assert code == 0, output
        imported = set(re.findall(r"^import time: .*\|\s+(\S+)$", output, re.MULTILINE))
        assert "torch.optim.adamw" in imported
        assert not imported & SLOW_IMPORTS
