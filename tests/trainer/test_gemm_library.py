"""The library for float32 GEMMs: the faster one, if its results are exact; the same one after a resume."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from trainer.host import gemm_library
from trainer.host.gemm_library import DEFAULT, ONEDNN, choose_library
from trainer.host.numerics import Numerics, explore, restore_numerics

PRECISION = {DEFAULT: "none", ONEDNN: "bf16"}
NUMERICS = Numerics(torch.device("cpu"), torch.float32, torch.float32, "as asked", 1, True, "a CPU")


@pytest.fixture(autouse=True)
def library_is_restored() -> Iterator[None]:
    before = precision()
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


def precision() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)


def host_with(monkeypatch: pytest.MonkeyPatch, factor: float, is_exact: bool = True, **flags: bool) -> None:
    """A host on which oneDNN has this rate, relative to the default library, and these results."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True, **flags})
    monkeypatch.setattr(gemm_library, "_factor", lambda: factor)
    monkeypatch.setattr(gemm_library, "_is_exact", lambda: is_exact)


@pytest.mark.parametrize(
    ("factor", "is_exact", "flags", "chosen"),
    [
        (2.2, True, {}, ONEDNN),
        (1.1, True, {}, DEFAULT),
        (2.2, False, {}, DEFAULT),
        (2.2, True, {"avx512_bw": False}, DEFAULT),
        (2.2, True, {"amx_tile": True}, DEFAULT),
    ],
    ids=["faster", "hardly faster", "not exact", "without AVX-512", "with AMX"],
)
def test_onednn_is_used_where_it_is_faster_and_exact(
    monkeypatch: pytest.MonkeyPatch, factor: float, is_exact: bool, flags: dict[str, bool], chosen: str
) -> None:
    host_with(monkeypatch, factor, is_exact, **flags)
    threads = torch.get_num_threads()
    assert choose_library() == chosen
    assert precision() == PRECISION[chosen]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("before", [DEFAULT, ONEDNN])
def test_a_resumed_run_uses_the_library_of_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A rate close to the limit may be measured above it once and below it the next time."""
    host_with(monkeypatch, 2.2 if before == DEFAULT else 1.1)
    now = replace(NUMERICS, library=choose_library())
    assert now.library != before
    restored = restore_numerics(now, {**NUMERICS.saved(), "gemm_library": before})
    assert restored.library == before
    assert precision() == PRECISION[before]


def test_a_resume_elsewhere_does_not_use_a_library_that_is_not_exact_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_with(monkeypatch, 2.2, is_exact=False)
    restored = restore_numerics(NUMERICS, {**NUMERICS.saved(), "gemm_library": ONEDNN})
    assert restored.library == DEFAULT
    assert precision() == PRECISION[DEFAULT]


def test_results_of_this_cpu_have_the_digits_of_float32() -> None:
    """With the library that is chosen here, in the orders in which forward and backward read matrices."""
    choose_library()
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(3, 200, 200, generator=generator) - 0.5 for _ in range(2))
    for x, y in ((a, b), (a.mT, b), (a, b.mT), (a[0], b[0])):
        assert float((x @ y - x.double() @ y.double()).abs().max()) < 2e-5


def test_matrices_that_were_converted_to_bfloat16_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX would convert them; here a stand-in does."""
    multiply = torch.Tensor.__matmul__

    def converting(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        is_converted = precision() == PRECISION[ONEDNN] and a.dtype == torch.float32
        return multiply(a.bfloat16(), b.bfloat16()).float() if is_converted else multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", converting)
    assert not gemm_library._is_exact()


@pytest.mark.parametrize(("chooses", "library"), [(True, ONEDNN), (False, DEFAULT)])
def test_a_rank_chooses_the_library_unless_it_measures_plain_ddp(
    monkeypatch: pytest.MonkeyPatch, chooses: bool, library: str
) -> None:
    host_with(monkeypatch, 2.2)
    threads = torch.get_num_threads()
    cpu = explore("cpu", "float32", threads, 0, 1, chooses).cpu
    assert (cpu.library, cpu.facts()["GEMM library"], precision()) == (library, library, PRECISION[library])
    assert ("float32 GEMMs by oneDNN" in cpu.describe()) == chooses
