"""Imports of the trainer form a DAG in one order of packages. The sources are parsed, not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest level first: a package imports only from levels listed before its own.
LEVELS = (
    ("code_digest", "config", "formatting"),
    ("options", "presets", "stages"),
    ("host",),
    ("data", "model", "optim"),
    ("outcome",),
    ("distributed",),
    ("sync", "run_plan", "rank_batch"),
    ("health",),
    ("placement", "checkpoint"),
    ("chat", "tracking"),
    ("eval",),
    ("setup",),
    ("train",),
    ("elastic",),
    ("bench", "interchange", "serve"),
    ("__main__",),
)
WITHOUT_COLLECTIVES = ("data", "model", "optim")

Modules = Mapping[str, ast.Module]


def read_modules(root: Path) -> dict[str, ast.Module]:
    """Dotted name within the package -> syntax tree."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text(encoding="utf-8"))
    return modules


def names_of_imports(tree: ast.Module) -> Iterator[str]:
    """Every name that is imported anywhere in a module, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are by full names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(modules: Modules, name: str, top: str = "trainer") -> set[str]:
    """The modules of the package `top` that a module imports, its own package included."""
    found = set()
    for imported in names_of_imports(modules[name]):
        inner = imported.removeprefix(f"{top}.")
        if inner != imported:
            while inner and inner not in modules:  # a class or function of the module before the dot
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {name}


def find_cycle(modules: Modules, top: str = "trainer") -> list[str]:
    """The modules of an import cycle, empty without one."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for imported in sorted(imported_modules(modules, name, top)):
                if cycle := visit(imported, [*path, name]):
                    return cycle
            done.add(name)
        return []

    for name in modules:
        if cycle := visit(name, []):
            return cycle
    return []


def upward_imports(modules: Modules) -> list[str]:
    """Imports of a package that is not below the importing one."""
    level = {package: number for number, packages in enumerate(LEVELS) for package in packages}
    found = []
    for name in filter(None, modules):
        own = name.partition(".")[0]
        for imported in filter(None, imported_modules(modules, name)):
            other = imported.partition(".")[0]
            if other != own and level[other] >= level[own]:
                found.append(f"{name} imports {imported}")
    return found


def collectives(modules: Modules) -> list[str]:
    """Imports of torch.distributed in packages that compute on one rank alone."""
    return [
        f"{name} imports {imported}"
        for name, tree in modules.items()
        if name.partition(".")[0] in WITHOUT_COLLECTIVES
        for imported in names_of_imports(tree)
        if imported.startswith("torch.distributed")
    ]


def path_edits(modules: Modules) -> list[str]:
    """Uses of runpy and of sys.path, by which a module would load what it does not import."""
    found = []
    for name, tree in modules.items():
        found += [
            f"{name} imports {imported}"
            for imported in names_of_imports(tree)
            if imported.partition(".")[0] == "runpy" or imported == "sys.path"
        ]
        found += [
            f"{name}, line {node.lineno}: sys.path"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"
        ]
    return found


TRAINER = read_modules(ROOT / "trainer")


def test_every_package_has_its_level() -> None:
    known = {package for packages in LEVELS for package in packages}
    assert known == {name.partition(".")[0] for name in TRAINER if name}


def test_imports_have_no_cycle() -> None:
    assert find_cycle(TRAINER) == []


@pytest.mark.parametrize("folder", ["fleet", "scripts", "benchmarks", "plugins"])
def test_imports_of_the_other_packages_have_no_cycle(folder: str) -> None:
    top = "ansible_collections.nanofleet.fleet.plugins" if folder == "plugins" else folder
    modules = read_modules(ROOT / folder)
    assert any(imported_modules(modules, name, top) for name in modules)
    assert find_cycle(modules, top) == []


def test_a_package_imports_only_what_is_below_it() -> None:
    assert upward_imports(TRAINER) == []


def test_model_optimizer_and_data_use_no_collectives() -> None:
    assert collectives(TRAINER) == []


def test_nothing_is_loaded_but_by_an_import() -> None:
    assert path_edits(TRAINER) == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"host": "from trainer.setup import x", "setup": "import trainer.host"}, "cycle"),
        ({"host.cores": "def f():\n    from trainer.host import gpu", "host.gpu": ""}, ""),
        ({"host.cores": "def f():\n    from trainer import train", "train": ""}, "upward"),
        ({"model.gpt": "from trainer.optim.muon import x", "optim.muon": ""}, "upward"),
        ({"data.rows": "from torch import distributed"}, "collectives"),
        ({"data.rows": "import sys\nsys.path.insert(0, '.')"}, "path"),
        ({"plan": "import runpy"}, "path"),
    ],
)
def test_the_checks_find_what_they_look_for(sources: dict[str, str], found: str) -> None:
    modules = {"": ast.parse(""), **{name: ast.parse(source) for name, source in sources.items()}}
    results = {
        "cycle": find_cycle(modules),
        "upward": upward_imports(modules),
        "collectives": collectives(modules),
        "path": path_edits(modules),
    }
    assert bool(results[found]) if found else not any(results.values())


def test_nothing_unpickles_what_another_host_has_sent() -> None:
    """Collectives of objects pickle them; torch.load does, unless weights_only is True."""
    users = {name for name, tree in TRAINER.items() if "pickle" in names_of_imports(tree)}
    # An unpickler that knows plain data only; the others name an exception.
    assert users == {"interchange.pickled_tokenizer", "interchange.weights", "checkpoint.storage"}
    for name, tree in TRAINER.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            assert not re.search(r"(gather|broadcast|scatter|send|recv)_object", called), (name, called)
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(call), name
