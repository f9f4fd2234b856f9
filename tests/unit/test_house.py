"""The house rules that a machine can check: ansible.cfg, root playbooks, argument specs, public words."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.docs_defaults import spec_defaults

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(p for p in (ROOT / "roles").iterdir() if p.is_dir())
ROOT_PLAYBOOKS = sorted(
    p
    for p in ROOT.glob("*.yml")
    if p.name not in ("requirements.yml", "galaxy.yml", "mkdocs.yml", "execution-environment.yml")
)


def load(path: Path) -> object:
    return yaml.safe_load(path.read_text())


def test_ansible_cfg_is_valid() -> None:
    done = subprocess.run(
        ["ansible-config", "validate", "--format", "ini", "-t", "all"],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}


@pytest.mark.parametrize("playbook", ROOT_PLAYBOOKS, ids=lambda p: p.name)
def test_root_playbooks_hold_one_import(playbook: Path) -> None:
    plays = load(playbook)
    assert isinstance(plays, list)
    assert [set(play) for play in plays] == [{"name", "ansible.builtin.import_playbook"}]
    assert plays[0]["ansible.builtin.import_playbook"] == f"playbooks/{playbook.name}"


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_defaults_and_argument_specs_hold_the_same_keys(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml") or {}
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    described = {
        name: option for spec in specs.values() for name, option in (spec.get("options") or {}).items()
    }
    without_default = {name for name, option in described.items() if option.get("required")}
    assert set(defaults) == set(described) - without_default
    assert all(name.startswith(f"{role.name}_") for name in described)
    for name, option in described.items():
        assert option.get("type"), name
        assert option.get("description"), name
        if "default" in option:
            assert option["default"] == spec_defaults().get(name, defaults[name]), (
                f"{name}: python -m scripts.docs_reference"
            )


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_roles_know_no_group(role: Path) -> None:
    for path in role.rglob("*.y*ml"):
        assert not re.search(r"\bgroups\s*\[|\bgroups\.|group_names", path.read_text()), path


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_roles_read_no_private_variable_of_another_role(role: Path) -> None:
    """A private variable begins with two underscores and the name of its role."""
    others = [other.name for other in ROLES if not role.name.startswith(other.name)]
    private = re.compile(rf"\b__({'|'.join(sorted(others, key=len, reverse=True))})_")
    own = re.compile(rf"__{role.name}_")
    for path in [path for kind in ("*.yml", "*.j2") for path in role.rglob(kind)]:
        for hit in private.finditer(path.read_text()):
            assert own.match(path.read_text(), hit.start()), (path, hit.group())


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_what_a_role_registers_hides_none_of_its_variables(role: Path) -> None:
    """It would hold for the rest of the playbook, also where the role is called again."""
    held = set(load(role / "defaults" / "main.yml") or {})
    for path in role.glob("vars/*.yml"):
        held |= set(load(path) or {})
    for path in role.glob("tasks/*.yml"):
        registered = set(re.findall(r"^ *register: (\w+)", path.read_text(), re.MULTILINE))
        assert not registered & held, path


LIMITED = [
    *(playbook for playbook in ROOT_PLAYBOOKS if playbook.name != "reset.yml"),
    ROOT / "playbooks" / "watch.yml",
]


@pytest.mark.parametrize("playbook", LIMITED, ids=lambda p: p.name)
def test_every_playbook_but_reset_looks_for_a_limit_first(playbook: Path) -> None:
    while playbook.name != "check_limit.yml":
        playbook = playbook.parent / load(playbook)[0]["ansible.builtin.import_playbook"]


@pytest.mark.parametrize("playbook", ["train.yml", "lab.yml"])
def test_a_limit_is_refused_on_whatever_host_it_leaves(playbook: str) -> None:
    """With it the plays on localhost would be passed over without a word, the check of the settings too."""
    hosts = ROOT / "inventory" / "sample" / "hosts.yml"
    done = subprocess.run(
        ["ansible-playbook", "-i", str(hosts), "-l", "workers", "-e", "dept=4", playbook],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.count("TASK [") == 1, done.stdout
    assert "it needs all hosts" in done.stdout
    assert str(hosts) in done.stdout.replace("\n", "")
