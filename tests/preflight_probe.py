"""The preflight role's plugins, and what its probe says on a host with which nothing is wrong."""

from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_hosts as hosts
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_run as run
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_use as use
from port_range import DASHED

ROOT = Path(__file__).resolve().parents[1]

LIMITS: dict[str, Any] = {
    "free_gb": 3,
    "skew_s": 5,
    "pythons": ["3.11", "3.12", "3.13"],
    "architectures": ["x86_64", "aarch64"],
}
# As a Debian 12 laptop on its mains says it, sleep.target masked.
GOOD = """kernel=Linux
machine=x86_64
systemd=yes
systemd_version=252
distribution=debian 12
python3=yes
python=3.11
disk=/opt/nanofleet 9000000 /
disk=/var/lib/nanofleet 9000000 /
memory_kb=16000000
available_kb=12000000
limit=
biggest=3355443 4711 ada firefox-esr
cores=4
online=0-3
load=0.31
flags=avx avx2 avx512f avx512_bf16
chassis=10
battery=Charging 63
mains=1
sleep=masked
suspend=masked
HandleLidSwitch=suspend
HandleLidSwitchExternalPower=
IdleAction=ignore
"""
ROOT_OK = f"""sent=1000
time=1001
uid=0
unit=
run_file=
kept_kb=
vocabulary=
range={DASHED} 0 0
"""


def reported(text: str = GOOD, root: str = ROOT_OK, **options: Any) -> list[dict[str, str]]:
    """All findings about a host with this probe text; options: of the filters, and variables of the host."""
    variables = {
        "__preflight_probe": {"stdout": text},
        "__preflight_root": {"stdout": root, "msg": options.pop("msg", "")},
        "ansible_user": "me",
        **options.pop("variables", {}),
    }
    hostvars = {"laptop": variables}
    facts = hosts.facts_of(["laptop"], hostvars)
    asked = {"asked": "config" in options, "config": options.get("config"), **options}
    found = [
        *hosts.host_findings(["laptop"], hostvars, {**LIMITS, **options}),
        *run.run_findings(facts, asked),
        *use.use_findings(facts, {"holds_sleep": True, **options}),
    ]
    assert all(f["host"] == "laptop" for f in found)
    return found


def host(text: str = GOOD, root: str = ROOT_OK, **options: Any) -> list[tuple[str, str]]:
    return [(f["problem"], f["remedy"]) for f in reported(text, root, **options)]


def put(text: str, **lines: str) -> str:
    """The probe's text with other values of some keys."""
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in lines]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in lines.items())]) + "\n"


AWAKE = put(GOOD, sleep="static", suspend="static")


def severity(found: list[dict[str, str]]) -> list[str]:
    return [f["severity"] for f in found]
