"""doctor.yml against hosts with faults: it must name each, its host and what mends it, and leave nothing.

Its place after test_run.py spares a second setup. The slow test plants every fault by itself and writes the
table of docs/doctor.md; it takes about 6 minutes. The others cost
under 90 s together on hosts that are set up.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from .conftest import ROOT, Fleet
from .faults import FAULTS, Fault, Lab, Said, ask_doctor, table

pytestmark = pytest.mark.lab

# Faults that do not hide each other: one look finds them all.
TOGETHER = ("data", "held-port", "loopback-name", "blocked-ports")


@pytest.fixture(scope="module")
def lab(fleet: Fleet, dataset: Path) -> Lab:
    """The session's two hosts, set up."""
    fleet.play("setup.yml", data_dir=dataset)
    return Lab(fleet)


def check(said: Said, fault: Fault, lab: Lab) -> None:
    host = lab.names[(fault.blames or fault.host) - 1]
    found = said.findings(fault.kind)
    assert [each["host"] for each in found] == [host], f"{fault.name}: {said.text}"
    (finding,) = found
    assert finding["severity"] == fault.severity
    for words in fault.says:
        assert words in finding["problem"], f"{fault.name}: {finding['problem']}"
    assert fault.remedy in finding["remedy"], f"{fault.name}: {finding['remedy']}"


def leftovers(lab: Lab) -> list[str]:
    """Processes of doctor that are still on the hosts, and files of the login user in /tmp."""
    look = (
        "ps -u ops -o args= | grep -v -e systemd -e sd-pam -e sshd -e 'ps -u' -e ' -c ' || true; ls /tmp ~ops"
    )
    return [lab.fleet.on(name, look) for name in lab.names]


def test_good_hosts_get_a_matrix_and_nothing_is_left(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    before = leftovers(lab)
    said = ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    assert said.report["good"]
    assert not [each for each in said.report["findings"] if each["severity"] == "error"]
    assert said.seconds < 60
    assert said.report["seconds"] < 60
    for host in lab.names:
        measured = said.report["hosts"][host]
        assert measured["gemm_gflops"]["float32"] > 1
        assert measured["gemm_gflops"]["bfloat16"] > 0.1
        assert measured["copy_gb_s"] > 0.5
        assert measured["cores"] == 1
    for pair in said.report["pairs"]:
        assert pair["open"]
        assert pair["mtu"] == {"sent": 1500, "passes": 1500, "swallowed": False}
        assert 0 < pair["rtt_ms"]["median"] < 50
        assert pair["mbit"] > 100
        assert pair["allreduce_mbit"] > 50
    assert leftovers(lab) == before


def test_faults_of_different_kinds_are_found_in_one_look(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    faults = [next(fault for fault in FAULTS if fault.kind == kind) for kind in TOGETHER]
    with ExitStack() as planted:
        for fault in faults:
            planted.enter_context(lab.planted(fault))
        said = ask_doctor(lab.fleet, tmp_path, fails=True, data=dataset)
    for fault in faults:
        check(said, fault, lab)
    assert not said.report["good"]


def test_train_looks_at_a_changed_fleet_first(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    """And not at one that has not changed, nor when told not to."""
    knobs = {
        "data_dir": dataset, "depth": 1, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "steps": 3,
        "total_batch_size": 1024, "device_batch_size": 4, "warmup_steps": 1, "eval_tokens": 1024,
    }  # fmt: skip
    ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    lab.fleet.play("train.yml", run_id="looked", **knobs)
    lab.fleet.play("playbooks/watch.yml", run_id="looked")
    fault = FAULTS[2]
    with lab.planted(fault):
        refused = lab.fleet.play("train.yml", fails=True, run_id="unlooked", **knobs)
    assert "/etc/ufw/user.rules" in refused.stdout
    assert "has no rule that lets" in refused.stdout
    assert not refused.results("Start the unit")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_is_named(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    rows = []
    for fault in FAULTS:
        inventory = lab.inventory_with(fault, tmp_path)
        fleet = Fleet(lab.fleet.workdir, inventory) if inventory else lab.fleet
        with lab.planted(fault):
            said = ask_doctor(fleet, tmp_path, fails=fault.severity == "error", data=dataset)
        check(said, fault, lab)
        assert said.seconds < 60, f"{fault.name} took {said.seconds:.0f} s"
        rows.append((fault, said))
    good = ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    page = ROOT / "docs" / "doctor.md"
    before, _mark, rest = page.read_text().partition("<!-- faults -->\n")
    _old, _mark, after = rest.partition("<!-- end -->")
    names = dict(zip(lab.names, ("tower", "laptop"), strict=True))

    def renamed(line: str) -> str:
        for name, other in names.items():
            line = line.replace(name, other)
        for address, other in zip(lab.addresses, ("10.0.0.1", "10.0.0.2"), strict=True):
            line = line.replace(address, other)
        return line

    page.write_text(f"{before}<!-- faults -->\n{table(rows, good, renamed)}\n<!-- end -->{after}")
