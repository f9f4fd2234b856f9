"""The lookups: a setting or its declared default, the settings of a run, and whether tasks are root."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.nanofleet.fleet.plugins.lookup import run_settings

from trainer.config import RunConfig
from trainer.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]


def resolved(template: str, **variables: Any) -> Any:
    given = {
        name: trust_as_template(value) if isinstance(value, str) else value
        for name, value in variables.items()
    }
    return Templar(loader=DataLoader(), variables=given).template(trust_as_template(template))


SETTING = "{{{{ lookup('nanofleet.fleet.setting', '{}') }}}}"
RUN = "{{ lookup('nanofleet.fleet.run_settings') }}"
AS_ROOT = "{{ lookup('nanofleet.fleet.as_root') }}"


def test_a_setting_has_the_default_of_the_role_that_declares_it() -> None:
    declared = yaml.safe_load((ROOT / "roles" / "network" / "defaults" / "main.yml").read_text())
    assert resolved(SETTING.format("network_port_low")) == declared["network_port_low"]


def test_a_setting_of_no_role_has_the_default_of_the_list() -> None:
    assert resolved(SETTING.format("store_port")) == 29500


def test_a_variable_goes_before_the_default_and_is_templated() -> None:
    assert resolved(SETTING.format("store_port"), store_port="{{ base + 1 }}", base=2000) == 2001


def test_a_name_without_a_declaration_is_an_error() -> None:
    with pytest.raises(AnsibleError, match="There is no setting store_prot"):
        resolved(SETTING.format("store_prot"))


@pytest.mark.parametrize("name", RunConfig.field_names())
def test_every_field_of_a_run_is_a_setting(name: str) -> None:
    assert resolved(RUN, **{name: "{{ value }}"}, value="7", of_nobody=1) == {name: "7"}


def test_steps_is_the_short_name_of_num_iterations() -> None:
    assert resolved(RUN, steps=7, num_iterations=9) == {"num_iterations": 7}


def test_an_empty_setting_counts_as_not_set() -> None:
    assert resolved(RUN, sync="", depth=8) == {"depth": 8}


def requested(monkeypatch: pytest.MonkeyPatch, typed: dict[str, Any], **inventory: Any) -> Any:
    """The settings of a run: `typed` are the extra vars of the command."""
    monkeypatch.setattr(run_settings, "load_extra_vars", lambda loader: typed)
    return resolved(RUN, **{**inventory, **typed})


def test_a_preset_is_the_settings_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested(monkeypatch, {"preset": "smoke"}) == PRESETS["smoke"].settings


def test_a_preset_goes_before_the_inventory_and_a_typed_setting_before_the_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = {"preset": "smoke", "depth": "{{ small + 2 }}"}
    given = requested(monkeypatch, typed, small=4, head_dim=128, seed=7, steps=500, target_flops=1e12)
    assert given == {**PRESETS["smoke"].settings, "depth": 6, "seed": 7}


def test_a_typed_length_replaces_that_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    given = requested(monkeypatch, {"preset": "smoke", "target_flops": "1e12"}, num_iterations=500)
    assert (given["target_flops"], "num_iterations" in given) == ("1e12", False)
    assert requested(monkeypatch, {"preset": "smoke", "steps": "20"})["num_iterations"] == "20"


def test_an_unknown_preset_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnsibleError, match="preset is 'smok': it takes smoke"):
        requested(monkeypatch, {"preset": "smok"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({}, True),
        ({"ansible_become": "{{ not sudo }}", "sudo": True, "ansible_user": "eva"}, False),
        ({"ansible_become": "no"}, False),
        ({"ansible_become": "no", "ansible_user": "{{ 'root' }}"}, True),
        ({"ansible_become": "yes", "ansible_user": "eva"}, True),
    ],
)
def test_tasks_are_root_unless_the_inventory_excludes_it(host: dict[str, Any], expected: bool) -> None:
    assert resolved(AS_ROOT, **host) is expected
