"""The lookups of the wiring: a setting or its declared default, and the settings of a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from trainer.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def resolved(template: str, **variables: Any) -> Any:
    given = {
        name: trust_as_template(value) if isinstance(value, str) else value
        for name, value in variables.items()
    }
    return Templar(loader=DataLoader(), variables=given).template(trust_as_template(template))


SETTING = "{{{{ lookup('nanofleet.fleet.setting', '{}') }}}}"
RUN = "{{ lookup('nanofleet.fleet.run_settings') }}"


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
