"""The checkout is the collection nanofleet.fleet: its layout, its archive, its documentation."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils.project_folder import (
    cache_folder,
    project_folder,
)

from trainer import __version__

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


def _lookups() -> list[str]:
    return sorted(path.stem for path in (ROOT / "plugins" / "lookup").glob("*.py"))


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
    names = {"module": _modules, "filter": _filters, "lookup": _lookups}[kind]()
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
        printed = options[name]
        assert printed["description"], f"{where}: {name}"
        for key in ("type", "elements", "choices", "default", "required"):
            empty = False if key == "required" else None
            assert option.get(key, empty) == printed.get(key, empty), f"{where}: {name}: {key}"
        if "options" in option:
            _same(option["options"], printed["suboptions"], f"{where}: {name}")


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


@pytest.mark.parametrize("name", _lookups())
def test_every_lookup_is_documented(name: str) -> None:
    shown = documented("lookup")[name]
    assert shown["doc"]["short_description"]
    assert shown["doc"]["description"]
    assert f"lookup('nanofleet.fleet.{name}'" in shown["examples"]
    assert shown["return"]["_raw"]["type"]


# -- the archive ---------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package_and_the_collections_those_of_requirements() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = package["project"]["version"]
    assert galaxy["version"] == __version__ == version
    for name in ("execution-environment.yml", "docs/how-to/collection.md"):
        assert set(re.findall(r"nanofleet-fleet-([\d.]+)\.tar", (ROOT / name).read_text())) == {version}, name
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
        "plugins/modules/run_state.py", "plugins/filter/fleet.py", "plugins/filter/run_status.yml",
        "plugins/action/follow_log.py", "trainer/config.py", "fleet/__main__.py",
        "meta/execution-environment.yml", "requirements/controller.txt", "requirements/bindep.txt",
    }  # fmt: skip
    assert not wanted - names
    tops = {name.split("/")[0] for name in names}
    assert not tops & {"tests", "molecule", "benchmarks", "data", "runs", "artifacts", "dist", "build"}
    assert not {top for top in tops if top.startswith(".")}
    assert not {name for name in names if name.endswith(".pyc") or "__pycache__" in name}


def test_the_execution_environment_holds_the_archive_and_what_a_controller_needs(
    archive: Path, tmp_path: Path
) -> None:
    """ansible-builder checks the definition and writes the build context; the image is not built."""
    definition = yaml.safe_load((ROOT / "execution-environment.yml").read_text())
    source = definition["additional_build_files"][0]["src"]
    assert Path(source).name == archive.name
    (tmp_path / source).parent.mkdir()
    (tmp_path / source).write_bytes(archive.read_bytes())
    (tmp_path / "execution-environment.yml").write_text(yaml.safe_dump(definition))
    done = subprocess.run(
        ["ansible-builder", "create", "--context", "context"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    build = tmp_path / "context" / "_build"
    [collection] = yaml.safe_load((build / "requirements.yml").read_text())["collections"]
    assert (build / collection["name"]).read_bytes() == archive.read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["controller"]
    named = {re.match(r"[\w-]+", line)[0]: line for line in wanted}
    runtime = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text())["requires_ansible"]
    assert definition["dependencies"]["ansible_core"]["package_pip"] == f"ansible-core{runtime}"
    assert definition["dependencies"]["ansible_runner"]["package_pip"] == named.pop("ansible-runner")
    del named["ansible"]  # ansible-core and the collections
    listed = (ROOT / "requirements" / "controller.txt").read_text().splitlines()
    assert [line for line in listed if not line.startswith("#")] == list(named.values())


def test_the_plugins_of_the_archive_import_nothing_from_a_checkout(archive: Path, tmp_path: Path) -> None:
    """What plugins import of the trainer needs the standard library and the collection alone."""
    folder = tmp_path / "ansible_collections" / "nanofleet" / "fleet"
    with tarfile.open(archive) as opened:
        opened.extractall(folder)  # our own archive; the argument filter needs Python 3.11.4
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


@pytest.mark.processes
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout; beside it, in `installed`, the collection as ansible-galaxy installs it."""
    for name, mark in (("checkout", "galaxy.yml"), ("installed", "MANIFEST.json")):
        (tmp_path / name / "roles" / "lab").mkdir(parents=True)
        (tmp_path / name / "playbooks").mkdir()
        (tmp_path / name / mark).touch()
    return tmp_path / "checkout"


def test_relative_paths_begin_in_the_checkout_or_where_the_command_is_typed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", "/home/ada")
    link = checkout / "linked"
    link.symlink_to(checkout)
    for path in (checkout / "playbooks", checkout / "roles" / "lab", link / "playbooks"):
        assert project_folder(str(path)) == str(checkout)
    assert project_folder(str(checkout.parent / "installed" / "playbooks")) == "/home/ada"
    assert project_folder(str(checkout.parent / "installed" / "roles" / "lab")) == "/home/ada"


def test_the_cache_is_in_the_checkout_or_in_the_users_cache_or_temporary(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed collection may be a system's, read by all, and in a container there may be no home."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    installed = str(tmp_path / "installed" / "roles" / "wheelhouse")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(str(checkout / "roles")) == (str(checkout), True)
    assert cache_folder(installed) == (f"{tmp_path}/.cache/nanofleet", True)
    monkeypatch.setenv("HOME", "/nonexistent")
    temporary = tmp_path / f"nanofleet-{os.getuid()}"
    assert cache_folder(installed) == (str(temporary), False)
    assert temporary.stat().st_mode & 0o777 == 0o700
    temporary.chmod(0o777)
    with pytest.raises(PermissionError, match="XDG_CACHE_HOME"):
        cache_folder(installed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder(installed) == (f"{tmp_path}/cache/nanofleet", True)


def test_nothing_is_kept_in_the_folder_of_an_installed_collection() -> None:
    """What a role writes on the controller begins in one of the two folders of project_folder.py."""
    own = re.compile(r"(role_path|_source)[^}|\n]*}}/\.|role_path[^}\n]*realpath")
    for path in [*ROOT.glob("roles/*/defaults/main.yml"), *ROOT.glob("roles/*/vars/main.yml")]:
        assert not own.search(path.read_text()), path
