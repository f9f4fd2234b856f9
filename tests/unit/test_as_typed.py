"""Commands in messages: with the -i and -K that the person gave, so that they can be typed as they stand."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from ansible import constants, context
from ansible.module_utils.common.collections import ImmutableDict
from ansible_collections.nanofleet.fleet.plugins.module_utils import typed_commands as plugin

ROOT = Path(__file__).resolve().parents[2]

SAID = "See it: ansible-playbook status.yml. Is it on? Try: ansible b -m ping"


@pytest.fixture
def _given(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(context, "CLIARGS", ImmutableDict(request.param))
    monkeypatch.setattr(constants, "DEFAULT_HOST_LIST", ["/repo/inventory/lab"])
    monkeypatch.setenv("PWD", "/repo")


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize(
    ("_given", "options"),
    [
        ({"inventory": ("/repo/inventory/lab",)}, ""),
        ({}, ""),
        ({"inventory": ("/repo/inventory/home",)}, "-i inventory/home "),
        ({"inventory": ("/else/where", "a,b,")}, "-i /else/where -i a,b, "),
        ({"inventory": ("/repo/my hosts",)}, "-i 'my hosts' "),
        ({"inventory": ("/repo/inventory/home",), "become_ask_pass": True}, "-i inventory/home -K "),
        ({"inventory": ("/repo/inventory/lab",), "become_ask_pass": True}, "-K "),
        ({"remote_user": "me", "private_key_file": "/my keys/id"}, "-u me --private-key '/my keys/id' "),
        (
            {"vault_password_files": ("/v",), "vault_ids": ("a@/w",)},
            "--vault-password-file /v --vault-id a@/w ",
        ),
        ({"ask_vault_pass": True, "vault_ids": ()}, "--ask-vault-pass "),
    ],
    indirect=["_given"],
)
def test_commands_carry_what_this_one_was_given(options: str) -> None:
    assert plugin.as_typed(SAID) == (
        f"See it: ansible-playbook {options}status.yml. Is it on? Try: ansible {options}b -m ping"
    )
    assert plugin.as_typed(["", SAID]) == ["", plugin.as_typed(SAID)]


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize(
    "_given",
    [
        {
            "args": ("nanofleet.fleet.status",),
            "inventory": ("/else/where",),
            "extra_vars": ("store_port=29511",),
        }
    ],
    indirect=True,
)
def test_a_command_that_was_typed_by_name_names_others_so() -> None:
    printed = plugin.as_typed(
        f"{SAID} Set it up: ansible-playbook setup.yml. Go on: ansible-playbook lab.yml"
    )
    assert printed == (
        "See it: ansible-playbook -i /else/where nanofleet.fleet.status. "
        "Is it on? Try: ansible -i /else/where b -m ping "
        "Set it up: ansible-playbook -i /else/where -e store_port=29511 nanofleet.fleet.setup. "
        "Go on: ansible-playbook nanofleet.fleet.lab"
    )


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize("_given", [{"inventory": ("/else/where",)}], indirect=True)
def test_what_is_no_command_on_the_fleet_stays() -> None:
    for text in ("ansible-playbook lab.yml -e lab_state=down", "ansible is needed", "run setup.yml again"):
        assert plugin.as_typed(text) == text


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize(
    "_given",
    [{"extra_vars": ("data_dir=/my/data depth=4", "@settings.yml", '{"store_port": 1}', "store_port=29511")}],
    indirect=True,
)
def test_setup_gets_the_path_of_the_data() -> None:
    printed = plugin.as_typed("Type: ansible-playbook setup.yml, then ansible-playbook train.yml -e run_id=a")
    assert printed == (
        "Type: ansible-playbook -e data_dir=/my/data -e store_port=29511 setup.yml, "
        "then ansible-playbook train.yml -e run_id=a"
    )


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize("_given", [{"extra_vars": ("store_port=29511",)}], indirect=True)
def test_a_port_to_be_written_into_the_inventory_is_not_overridden() -> None:
    fix = "write store_port: PORT into group_vars/fleet.yml of the inventory: ansible-playbook setup.yml"
    assert plugin.as_typed(fix) == fix


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize("_given", [{}, {"extra_vars": ("data_dir=/my/data",)}], indirect=True)
def test_setup_is_not_sent_to_a_folder_without_data(tmp_path: Path) -> None:
    printed = "Send the data again: ansible-playbook setup.yml"
    given = "data_dir=/my/data" in str(context.CLIARGS.get("extra_vars"))
    folder = "/my/data" if given else "FOLDER"
    assert plugin.as_typed(printed, str(tmp_path)).endswith(
        f"ansible-playbook -e data_dir={folder} setup.yml"
    )
    (tmp_path / "manifest.json").touch()
    assert ("data_dir" in plugin.as_typed(printed, str(tmp_path))) == given


def test_every_command_in_a_message_of_a_task_goes_through_it() -> None:
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        for printed in _messages(yaml.safe_load(path.read_text())):
            left = re.sub(
                r"\{\{(?:(?!\}\}).)*\| nanofleet\.fleet\.as_typed(?:\(\w+\))? \}\}",
                "",
                printed,
                flags=re.DOTALL,
            )
            assert not plugin.COMMAND.search(left), f"{path}: {printed}"


def _messages(node: object) -> list[str]:
    if isinstance(node, list):
        return [printed for part in node for printed in _messages(part)]
    if not isinstance(node, dict):
        return []
    own = [str(node[key]) for key in ("msg", "fail_msg", "success_msg") if key in node]
    return own + [printed for part in node.values() for printed in _messages(part)]


def test_a_folder_with_a_space_can_be_typed_again() -> None:
    given = plugin.settings(["data_dir='/my data'"])
    (_, assignment) = shlex.split(given)
    assert plugin.parse_kv(assignment) == {"data_dir": "/my data"}
