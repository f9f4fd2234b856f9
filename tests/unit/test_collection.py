"""The checkout is the collection nanofleet.fleet: its layout, its archive, its documentation."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.project_folder import project_folder

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ROOT / ".ansible" / "collections"
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
ROLES = sorted(p for p in (ROOT / "roles").iterdir() if p.is_dir())
PYTHON = [
    path
    for folder in ("plugins", "scripts", "fleet", "trainer", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


# -- one home for Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_roles_hold_no_python(role: Path) -> None:
    assert not list(role.rglob("*.py"))


def test_python_is_imported_and_not_run_or_found_by_other_ways() -> None:
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert "runpy" not in [alias.name for alias in node.names], path
            elif isinstance(node, ast.ImportFrom):
                assert node.module != "runpy", path
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "sys.path", f"{path}:{node.lineno}"
                assert node.attr not in ("__path__", "spec_from_file_location"), f"{path}:{node.lineno}"
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and path.name not in ("test_collection.py", "test_imports.py")
            ):
                # Programs that tests start.
                assert "sys.path." not in node.value, f"{path}:{node.lineno}"


OTHER_ROLE = re.compile(r"role_path[^}\n]*\.\./(?!\.\.)|\broles/(\w+)/(?:files|templates|vars|tasks)\b")


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_a_role_reads_no_file_of_another_role(role: Path) -> None:
    for path in [*role.rglob("*.yml"), *role.rglob("*.j2")]:
        for match in OTHER_ROLE.finditer(path.read_text()):
            assert match[1] == role.name, f"{path}: {match[0]}"


def test_names_of_the_collection_are_written_in_full() -> None:
    """Outside of a checkout nothing else resolves."""
    modules = "|".join(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))
    short = re.compile(rf"^ +(?:- )?(?:{modules}):\s*$", re.MULTILINE)
    roles = "|".join(role.name for role in ROLES)
    role = re.compile(rf"_role:\n\s+name: (?:{roles})$", re.MULTILINE)
    filters = re.compile(rf"\|\s*(?:{'|'.join(_filters())})\b(?!\s*\|)", re.MULTILINE)
    for folder in ("roles", "playbooks", "molecule"):
        for path in sorted((ROOT / folder).rglob("*.yml")):
            text = path.read_text()
            assert not role.search(text), path
            assert not filters.search(text), path
            if "meta" not in path.parts:
                assert not short.search(text), path


# -- documentation -------------------------------------------------------------------------------------------


def _modules() -> list[str]:
    folders = (ROOT / "plugins" / "modules", ROOT / "plugins" / "action")
    return sorted({path.stem for folder in folders for path in folder.glob("*.py")})


def _filters() -> list[str]:
    """The filters of every plugin, as the files name them."""
    return sorted(
        str(key.value)
        for path in (ROOT / "plugins" / "filter").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    )


@cache
def documented(kind: str) -> dict[str, dict[str, Any]]:
    """What ansible-doc knows of every plugin of a kind, by its short name."""
    names = _modules() if kind == "module" else _filters()
    done = subprocess.run(
        ["ansible-doc", "--json", "--type", kind, *(f"nanofleet.fleet.{name}" for name in names)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {name.removeprefix("nanofleet.fleet."): doc for name, doc in found.items()}


def _argument_spec(path: Path) -> dict[str, Any] | None:
    """The argument_spec that a module's main() passes on; None for an action's documentation."""
    tree = ast.parse(path.read_text())
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return value(known[node.id])
        if isinstance(node, ast.Dict):
            return {ast.literal_eval(k): value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        return ast.literal_eval(node)

    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "argument_spec":
            return dict(value(node.value))
    return None


def _same(spec: dict[str, Any], options: dict[str, Any], where: str) -> None:
    """The documentation says of every option what the code does."""
    assert set(spec) == set(options), where
    for name, option in spec.items():
        said = options[name]
        assert said["description"], f"{where}: {name}"
        for key in ("type", "elements", "choices", "default", "required"):
            empty = False if key == "required" else None
            assert option.get(key, empty) == said.get(key, empty), f"{where}: {name}: {key}"
        if "options" in option:
            _same(option["options"], said["suboptions"], f"{where}: {name}")


@pytest.mark.parametrize("name", _modules())
def test_every_module_and_action_is_documented(name: str) -> None:
    shown = documented("module")[name]
    doc = shown["doc"]
    assert doc["short_description"]
    assert doc["description"]
    assert doc["author"]
    assert f"nanofleet.fleet.{name}:" in shown["examples"]
    assert shown["return"]
    spec = _argument_spec(ROOT / "plugins" / "modules" / f"{name}.py")
    if spec is not None:
        _same(spec, doc.get("options") or {}, name)


@pytest.mark.parametrize("name", _filters())
def test_every_filter_is_documented(name: str) -> None:
    shown = documented("filter")[name]
    doc = shown["doc"]
    assert doc["short_description"]
    assert doc["description"]
    assert "_input" in doc["options"]
    assert all(option["description"] and option["type"] for option in doc["options"].values())
    use = rf"\|\s*nanofleet\.fleet\.{name}\b|map\('nanofleet\.fleet\.{name}'\)"
    assert re.search(use, shown["examples"])
    assert shown["return"]["_value"]["type"]


# -- the archive ---------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package_and_the_collections_those_of_requirements() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert galaxy["version"] == package["project"]["version"]
    listed = yaml.safe_load((ROOT / "requirements.yml").read_text())["collections"]
    assert galaxy["dependencies"] == {each["name"]: each["version"] for each in listed}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built archive."""
    folder = tmp_path_factory.mktemp("archive")
    command = ["ansible-galaxy", "collection", "build", "--output-path", str(folder), str(ROOT)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [built] = folder.iterdir()
    return built


def test_the_archive_holds_what_runs_and_nothing_else(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = set(opened.getnames())
    wanted = {
        "README.md", "LICENSE", "meta/runtime.yml", "constraints.txt", "pyproject.toml",
        "requirements/hashes.txt", "playbooks/setup.yml", "playbooks/train.yml",
        "playbooks/group_vars/all.yml", "roles/launch/tasks/main.yml", "roles/lab/files/lab-host",
        "plugins/modules/run_state.py", "plugins/filter/launch.py", "plugins/filter/launch_status.yml",
        "plugins/action/follow_log.py", "trainer/config.py", "fleet/__main__.py",
    }  # fmt: skip
    assert not wanted - names
    tops = {name.split("/")[0] for name in names}
    assert not tops & {"tests", "molecule", "benchmarks", "data", "runs", "artifacts", "dist", "build"}
    assert not {top for top in tops if top.startswith(".")}
    assert not {name for name in names if name.endswith(".pyc") or "__pycache__" in name}


def test_the_plugins_of_the_archive_import_nothing_from_a_checkout(archive: Path, tmp_path: Path) -> None:
    """What plugins import of the trainer needs the standard library and the collection alone."""
    folder = tmp_path / "ansible_collections" / "nanofleet" / "fleet"
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    names = [f"filter.{path.stem}" for path in sorted((folder / "plugins" / "filter").glob("*.py"))]
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module('ansible_collections.nanofleet.fleet.plugins.{name}')\n"
        for name in [*names, "action.check_settings"]
    )
    program += "assert not {'trainer', 'fleet'} & set(sys.modules), 'those of a checkout'\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("playbook", ["setup.yml", "nanofleet.fleet.setup"])
def test_playbooks_resolve_by_path_and_by_name_with_their_wiring(playbook: str, tmp_path: Path) -> None:
    """Without the variables beside the playbooks the hosts to check are not known."""
    by_name = playbook.startswith("nanofleet.")
    environment = dict(ENVIRONMENT)
    if by_name:
        (tmp_path / "ansible.cfg").write_text("[defaults]\n")
        environment["ANSIBLE_CONFIG"] = str(tmp_path / "ansible.cfg")
        environment["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)
    (tmp_path / "hosts.yml").write_text(
        "coordinator: {hosts: {tower: {dept: 4}}}\nworkers: {hosts: {laptop: {depth: deep}}}\n"
        "fleet: {children: {coordinator: {}, workers: {}}}\n"
    )
    done = subprocess.run(
        ["ansible-playbook", "-i", str(tmp_path / "hosts.yml"), playbook],
        cwd=tmp_path if by_name else ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "inventory depth of laptop" in done.stdout


def test_relative_paths_begin_in_the_checkout_or_where_the_command_is_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PWD", "/home/ada")
    assert project_folder("/src/nanofleet/playbooks") == "/src/nanofleet"
    installed = "/root/.ansible/collections/ansible_collections/nanofleet/fleet/playbooks"
    assert project_folder(installed) == "/home/ada"
