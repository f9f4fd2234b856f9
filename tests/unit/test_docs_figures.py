"""The measured figures of the pages are those of docs/recorded/bench.json."""

import json

import pytest

from scripts import docs_figures


def test_a_phrase_gets_its_figures_across_a_line_break() -> None:
    shown = {"a": 8.627, "b": "e9fffc0"}
    page = "It takes 7.0 s\na step (commit `x1`); 7.0 others."
    filled = docs_figures.filled(page, "takes {a:.1f} s a step (commit `{b}`)", shown)
    assert filled == "It takes 8.6 s\na step (commit `e9fffc0`); 7.0 others."


@pytest.mark.parametrize("page", ["no such phrase", "takes 1 s, takes 2 s"])
def test_a_phrase_that_does_not_occur_once_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="expects it once"):
        docs_figures.filled(page, "takes {a} s", {"a": 3})


def test_other_figures_change_the_pages() -> None:
    record = json.loads(docs_figures.RECORD.read_text())
    shown = docs_figures.values(record)
    assert f"{shown['exact'].hours:.1f}" == f"{shown['exact'].step_seconds * 5000 / 3600:.1f}"
    assert "| `exact`, float32 | 4,096 |" in docs_figures.table(record["two_hosts"])
