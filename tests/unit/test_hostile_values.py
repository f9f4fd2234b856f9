"""Values of an inventory that try to be more than a value: refused by host, and quoted where they arrive."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_inventory as preflight
from ansible_collections.nanofleet.fleet.plugins.module_utils import settings_check

ROOT = Path(__file__).resolve().parents[2]
ROLES = ROOT / "roles"
PREFLIGHT = ROLES / "preflight"
MEAN = [
    "x; touch MARK",
    "$(touch MARK)",
    "`touch MARK`",
    "x' 'y",
    'x" "y',
    "x\ny=1",
    "x\n",
    "-x y",
    "{{ x }}",
]
REACH_A_SHELL_OR_A_UNIT = [
    "fleet_memory", "fleet_cpus", "fleet_nice", "fleet_threads", "fleet_interface", "fleet_address",
    "nproc_per_node", "nanofleet_user", "nanofleet_prefix", "nanofleet_state", "run_id", "store_port",
    "tracker_port", "network_port_low", "network_port_high", "launch_attempts", "launch_stall_seconds",
]  # fmt: skip


def rendered(role: str, what: str, **given: Any) -> str:
    """A template of a role (by its file's name) or one of its variables; `given` goes before the defaults."""
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for folder in ("defaults", "vars"):
        path = ROLES / role / folder / "main.yml"
        if path.exists():
            variables |= loader.load_from_file(str(path), trusted_as_template=True) or {}
    variables |= given
    text = variables.get(what)
    if text is None:
        from ansible.template import trust_as_template

        text = trust_as_template((ROLES / role / "templates" / what).read_text())
    return str(Templar(loader=loader, variables=variables).template(text))


# -- refused, by host


@pytest.mark.parametrize("value", MEAN)
@pytest.mark.parametrize("name", REACH_A_SHELL_OR_A_UNIT)
def test_every_host_s_value_is_checked(name: str, value: str) -> None:
    inventory = {"tower": {}, "laptop": {name: value}}
    found = [f for f in settings_check.check({}, inventory) if "differs" not in f["problem"]]
    assert [f["host"] for f in found] == [f"inventory {name} of laptop"]
    assert found[0]["problem"].startswith(f"{name} is ")


def test_one_value_that_all_hosts_have_is_one_finding() -> None:
    inventory = {host: {"fleet_memory": "plenty"} for host in ("tower", "laptop")}
    [found] = settings_check.check({}, inventory)
    assert found["host"] == "inventory fleet_memory"


@pytest.mark.parametrize("name", ["depth", "device_batch_size", "steps", "run_id", "shares", "store_port"])
def test_a_setting_of_the_whole_fleet_has_one_value(name: str) -> None:
    values = {"run_id": ("a", "b"), "shares": ("1,1", "2,2")}.get(name, ("4096", "8192"))
    inventory = {host: {name: value} for host, value in zip(("tower", "laptop"), values, strict=True)}
    [found] = [f for f in settings_check.check({}, inventory) if "differs" in f["problem"]]
    assert found["problem"] == (
        f"{name} differs between the hosts ({values[0]} on tower, {values[1]} on laptop); "
        "all hosts need the same value."
    )
    assert settings_check.check({name: values[0]}, inventory) == []


@pytest.mark.parametrize("name", ['lap"top', "lap top", "$(x)", "-oProxyCommand=x", "a\nb"])
def test_a_host_s_own_name_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "resolved", lambda address: [address])
    found = list(
        preflight.inventory_findings({"t": "10.0.0.1", name: "10.0.0.2"}, ["t"], [name], ["t", name])
    )
    assert [f["problem"].split(" is not valid")[0] for f in found] == [f"The host name {name!r}"]


def play(
    inventory: dict[str, Any], folder: Path, playbook: str, *more: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory))
    return subprocess.run(
        ["ansible-playbook", "-i", str(path), playbook, *more], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip


def test_train_yml_refuses_the_second_host_s_value_before_a_host_is_touched(tmp_path: Path) -> None:
    workers = {"laptop": {"ansible_host": "192.0.2.2", "fleet_memory": "8G; touch /tmp/x"}}
    inventory = {
        "coordinator": {"hosts": {"tower": {"ansible_host": "192.0.2.1"}}},
        "workers": {"hosts": workers},
        "fleet": {"children": {"coordinator": {}, "workers": {}}},
    }
    done = play(inventory, tmp_path, "train.yml", "-e", "awx_job_id=7")
    printed = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert "inventory fleet_memory of laptop fleet_memory is '8G; touch /tmp/x': it takes a number" in printed
    assert "awx_job_id" not in printed
    assert "Read the facts of the host" not in done.stdout


# -- quoted, should one come through all the same


@pytest.mark.parametrize("value", MEAN)
def test_no_value_is_a_command_in_the_probe(value: str, tmp_path: Path) -> None:
    value = value.replace("MARK", str(tmp_path / "mark"))
    script = rendered(
        "preflight", "probe.sh.j2", preflight_python=value, preflight_memory_limit=value,
        preflight_prefix=value, preflight_state_dir="/var/lib/nanofleet",
    )  # fmt: skip
    printed = subprocess.run(["sh"], input=script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"limit={' '.join(value.split())}" in " ".join(printed.stdout.split())
    assert f"disk={value} " in printed.stdout
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("value", MEAN)
def test_no_value_is_a_command_in_the_probe_as_root(value: str, tmp_path: Path) -> None:
    value = value.replace("MARK", str(tmp_path / "mark"))
    script = rendered(
        "preflight", "root.sh.j2", preflight_ports={value: value}, preflight_port_range=f"{value}-{value}",
        preflight_run_asked=False,
    )  # fmt: skip
    subprocess.run(["sh"], input=script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("value", MEAN)
def test_no_value_is_a_second_line_of_an_environment_file(value: str) -> None:
    from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_settings import systemd_env as quote

    if "\n" in value:
        with pytest.raises(AnsibleError, match="line break"):
            quote(value)
        return
    # As systemd.exec(5) has it: between double quotes a backslash stands before one of these four.
    assert re.fullmatch(r'"([^"\\`$]|\\["\\`$])*"', quote(value))
    assert re.sub(r"\\([\"\\`$])", r"\1", quote(value)[1:-1]) == value


PLAN = {"run_id": "a", "file": {"hosts": ["tower"]}}


@pytest.mark.parametrize("value", MEAN)
def test_no_value_is_more_than_a_word_of_a_unit_s_property(value: str) -> None:
    given = {
        "launch_python": value, "launch_state_dir": f"/{value}", "launch_plan": {**PLAN, "run_id": value},
        "inventory_hostname": "tower", "launch_hosts": ["tower"],
    }  # fmt: skip
    if "\n" in value:
        with pytest.raises(AnsibleError, match="line break"):
            rendered("launch", "__launch_again", **given)
        return
    script = "/opt/nanofleet/unit"
    words = shlex.split(rendered("launch", "__launch_again", **given).replace("$$", "$"))
    assert words[:7] == [script, "again", value, "-m", "trainer", "again", "--run-dir"]
    assert words[7:9] == [f"/{value}/runs/{value}", "--wait"]
    words = shlex.split(rendered("launch", "__launch_awake", **given).replace("$$", "$"))
    assert words == [f"+-{script}", "awake", value, "sleep:idle:handle-lid-switch"]


UNIT = {
    "ansible_managed": "x", "__tracker_environment": "x", "ansible_become": True, "tracker_port": 5000,
    "inventory_hostname": "tower",
}  # fmt: skip


@pytest.mark.parametrize("value", [*MEAN, "50%n"])
def test_no_value_is_a_second_setting_of_the_tracker_s_unit(value: str) -> None:
    given = {
        **UNIT,
        "tracker_user": value,
        "tracker_dir": value,
        "tracker_prefix": value,
        "tracker_names": [value],
    }
    if "\n" in value:
        with pytest.raises(AnsibleError, match="line break"):
            rendered("tracker", "nanofleet-tracker.service.j2", **given)
        return
    text = rendered("tracker", "nanofleet-tracker.service.j2", **given).replace("\\\n", "")
    usual = rendered("tracker", "nanofleet-tracker.service.j2", **UNIT).replace("\\\n", "")
    assert [line.split("=")[0] for line in text.splitlines()] == [
        line.split("=")[0] for line in usual.splitlines()
    ]
    settings = [line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#"]
    for name, setting in settings:
        if name in ("ExecStart", "Environment", "ReadWritePaths"):
            words = shlex.split(setting)
            assert len(words) == len(shlex.split(dict_of(usual, name, setting))), setting
            assert not re.search(r"(?<!%)%(?!%)", setting)
    assert dict(settings)["User"].replace("%%", "%") == value


def dict_of(unit: str, name: str, setting: str) -> str:
    """The usual value of the setting that begins alike."""
    lines = [line.split("=", 1)[1] for line in unit.splitlines() if line.startswith(f"{name}=")]
    word = re.match(r'"?(\w+)', setting)
    return next((line for line in lines if word and line.lstrip('"').startswith(word[1])), lines[0])


def test_a_unit_s_properties_take_one_line() -> None:
    from ansible_collections.nanofleet.fleet.plugins.module_utils import unit_start

    with pytest.raises(RuntimeError, match=r"MemoryMax.* has a line break"):
        unit_start.assignments({"MemoryMax": "8G\nExecStart=/bin/x"})


# -- and none is written without


TEXTS = sorted(
    {*ROLES.glob("*/templates/*.sh.j2"), *ROLES.glob("*/tasks/*.yml"), *ROLES.glob("*/handlers/*.yml")}
)
SAFE = re.compile(r"\|\s*(quote|int)\b|\bmap\('quote'\)|^ (low|high) $")


def shell_texts(path: Path) -> list[str]:
    """What of a role's file a shell reads."""
    if path.suffix == ".j2":
        return [path.read_text()]

    def of(task: Any) -> list[str]:
        if isinstance(task, list):
            return [text for each in task for text in of(each)]
        if not isinstance(task, dict):
            return []
        found = [text for key in ("block", "rescue", "always") for text in of(task.get(key))]
        for module in ("shell", "raw", "command"):
            given = task.get(f"ansible.builtin.{module}")
            argv = given.get("argv") if isinstance(given, dict) else None
            if isinstance(argv, list) and "-c" in argv:
                found += [argv[argv.index("-c") + 1]]
            elif module == "shell" and isinstance(given, dict):
                found.append(str(given.get("cmd") or ""))
            elif isinstance(given, str):
                found.append(given)
        return found

    return of(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_what_a_shell_reads_is_quoted_or_a_number(path: Path) -> None:
    for text in shell_texts(path):
        if text.lstrip().startswith("{{") and "lookup(" in text:
            continue  # a template, which is looked at itself
        for expression in re.findall(r"{{(.*?)}}", text, re.DOTALL):
            assert SAFE.search(expression), f"{path}: {{{{{expression}}}}}"
