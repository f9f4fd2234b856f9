"""A CORE bundle that is missing, damaged or incomplete is refused with its file and line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from core_bundles import FIXTURE, golden_bundle, write_bundle
from golden_chat import GOLDEN

from trainer.data import DataError
from trainer.eval.core_bundle import read_bundle

CHOICES = {"query": "q", "choices": ["a", "b"], "gold": 0}
KINDS = {
    "multiple_choice": CHOICES,
    "schema": {"context_options": ["a", "b"], "continuation": "c", "gold": 1},
    "language_modeling": {"context": "a", "continuation": "b"},
}


def written(folder: Path, kind: str = "multiple_choice", **change: Any) -> Path:
    """A bundle with the task `t`, whose second item has `change`; a field that is None is left out."""
    wrong = {name: value for name, value in (KINDS[kind] | change).items() if value is not None}
    data = [KINDS[kind], wrong, KINDS[kind]]
    entry = {"label": "t", "task_type": kind, "num_fewshot": 1, "continuation_delimiter": " ", "data": data}
    return write_bundle(folder / "core", [entry], {"t": 25.0})


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_bundle(folder)
    return str(refused.value).replace(f"{folder}", "core")


def test_a_bundle_is_read_in_the_order_of_nanochat(tmp_path: Path) -> None:
    bundle = read_bundle(golden_bundle(tmp_path / "core"))
    assert [(task.label, task.fewshot, task.delimiter) for task in bundle.tasks] == [
        ("mc", 2, "\nAnswer: "),
        ("schema", 1, " "),
        ("lm", 1, " "),
    ]
    data = list(GOLDEN["core"]["tasks"][0]["data"])
    random.Random(1337).shuffle(data)
    assert list(bundle.tasks[0].items) == data
    assert bundle.limited(5).tasks[0].items == data[:5]
    assert bundle.limited(0).tasks[0].items == data
    assert bundle.tasks[0].centered(0.5) == pytest.approx((0.5 - 0.333) / (1 - 0.333))


def test_the_digest_follows_the_content_alone(tmp_path: Path) -> None:
    one, other = golden_bundle(tmp_path / "one"), golden_bundle(tmp_path / "other")
    assert read_bundle(one).digest == read_bundle(other).digest
    with open(other / "eval_data" / "some" / "lm.jsonl", "a") as file:
        file.write('{"context": "a", "continuation": "b"}\n')
    assert read_bundle(one).digest != read_bundle(other).digest


def test_the_bundle_of_the_tests_has_tasks_of_each_type() -> None:
    bundle = read_bundle(FIXTURE)
    assert {task.kind for task in bundle.tasks} == set(KINDS)
    assert all(10 <= len(task.items) <= 20 for task in bundle.tasks)


@pytest.mark.parametrize(
    ("kind", "change", "printed"),
    [
        ("multiple_choice", {"query": None}, "the item lacks query, a text"),
        ("multiple_choice", {"choices": "ab"}, "choices is missing, or no list of 2 texts or more"),
        ("multiple_choice", {"choices": ["a", None]}, "the item lacks choices, a text"),
        ("multiple_choice", {"gold": 2}, "gold is 2: it takes a number from 0 to 1"),
        ("schema", {"context_options": None}, "context_options is missing, or no list"),
        ("schema", {"gold": "0"}, "gold is '0': it takes a number from 0 to 1"),
        ("schema", {"continuation": None}, "the item lacks continuation"),
        ("language_modeling", {"context": []}, "the item lacks context, a text"),
        ("language_modeling", {"continuation": ""}, "continuation is empty"),
    ],
)
def test_an_item_without_a_field_is_named(
    kind: str, change: dict[str, Any], printed: str, tmp_path: Path
) -> None:
    text = refusal(written(tmp_path, kind, **change))
    assert text.startswith("core/eval_data/some/t.jsonl, line 2: ")
    assert printed in text


def test_numbers_are_texts(tmp_path: Path) -> None:
    items = read_bundle(written(tmp_path, query=7, choices=[1, 2.5])).tasks[0].items
    assert {"query": "7", "choices": ["1", "2.5"], "gold": 0} in list(items)


@pytest.mark.parametrize(
    ("file", "old", "new", "printed"),
    [
        ("core.yaml", "multiple_choice", "essay", "core/core.yaml, line 2: the task t has the type essay"),
        ("core.yaml", "label: t", "name: t", "core/core.yaml, line 2: the task lacks label"),
        (
            "core.yaml",
            "some/t.jsonl",
            "../../t.jsonl",
            "dataset_uri is ../../t.jsonl: it takes a path relative to eval_data",
        ),
        ("core.yaml", "- 1", "- many", "num_fewshot is 'many': it takes one number from 0, such as [10]"),
        ("core.yaml", "icl_tasks", "tasks", "core/core.yaml: it lacks icl_tasks"),
        ("core.yaml", "label: t", "label: [t", "core/core.yaml, line 5: not YAML"),
        ("core.yaml", "some/t.jsonl", "some/u.jsonl", "The CORE bundle core lacks eval_data/some/u.jsonl."),
        ("eval_meta_data.csv", "Eval Task", "Task", "line 1: it lacks the column Eval Task"),
        ("eval_meta_data.csv", "25.0", "", "core/eval_meta_data.csv, line 2: Random baseline is ''"),
        ("eval_meta_data.csv", "25.0", "100", "takes a percentage from 0, below 100"),
        ("eval_meta_data.csv", "\nt,", "\nu,", "core/eval_meta_data.csv has no row with t as Eval Task"),
        ("eval_data/some/t.jsonl", '{"query"', '"query"', "core/eval_data/some/t.jsonl, line 1: not JSON"),
    ],
)
def test_a_damaged_file_is_named(file: str, old: str, new: str, printed: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    assert printed in refusal(folder)


def test_a_missing_bundle_is_refused_with_what_to_type(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").startswith(
        "There is no CORE bundle core. Download a bundle to a new folder"
    )
    folder = written(tmp_path)
    (folder / "eval_meta_data.csv").unlink()
    assert "The CORE bundle core lacks eval_meta_data.csv. Copy the bundle again" in refusal(folder)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "eval_data" / "some" / "t.jsonl").write_bytes(json.dumps(CHOICES).encode() + b"\n\xff\n")
    assert refusal(folder).startswith("core/eval_data/some/t.jsonl, line 2: not UTF-8.")


def test_too_few_items_for_the_examples_are_refused(tmp_path: Path) -> None:
    bundle = read_bundle(written(tmp_path))
    with pytest.raises(DataError, match=r"t is limited to 1 of 3 items, .* needs 2 items .* Raise the limit"):
        bundle.limited(1)
    assert len(bundle.limited(2).tasks[0].items) == 2
