"""doctor.yml against hosts with faults: it must name each, its host and the fix for it, and leave nothing.

Its place after test_run.py spares a second setup. The slow test plants every fault by itself and writes the
table of docs/doctor.md; it takes about 6 minutes. The others cost
under 90 s together on hosts that are set up.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from .faults import FAULTS, DoctorOutput, Fault, Lab, ask_doctor, table
from .lab import ROOT, Fleet

pytestmark = pytest.mark.lab

# Faults that do not hide each other: one look finds them all.
TOGETHER = ("NF509", "NF507", "NF505", "NF528")
UFW_RULE_GONE = next(fault for fault in FAULTS if fault.name.startswith("no ufw rule"))
TINY = {
    "depth": 1, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "steps": 3, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 1, "eval_tokens": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(fleet: Fleet, dataset: Path) -> Lab:
    """The session's two hosts, set up."""
    fleet.play("setup.yml", data_dir=dataset)
    return Lab(fleet)


def check(printed: DoctorOutput, fault: Fault, lab: Lab) -> None:
    host = lab.names[(fault.blames or fault.host) - 1]
    found = printed.findings(fault.code)
    assert [each["host"] for each in found] == [host], f"{fault.name}: {printed.text}"
    (finding,) = found
    assert finding["severity"] == fault.severity
    for words in fault.says:
        assert words in finding["problem"], f"{fault.name}: {finding['problem']}"
    assert fault.remedy in finding["remedy"], f"{fault.name}: {finding['remedy']}"


def allowed_seconds() -> float:
    """A minute, and more on a machine whose cores others want too."""
    return 60 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def leftovers(lab: Lab) -> list[str]:
    """Processes of the login user on the hosts, and files in its home and in /tmp."""
    look = "ps -u ops -o args= | grep -v -e systemd -e sd-pam -e sshd; ls /tmp ~ops; true"
    return [lab.inside(name, look) for name in lab.names]


def test_good_hosts_get_a_matrix_and_nothing_is_left(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    before = leftovers(lab)
    printed = ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    assert printed.report["good"]
    assert not [each for each in printed.report["findings"] if each["severity"] == "error"]
    assert printed.report["seconds"] <= printed.seconds < allowed_seconds()
    for host in lab.names:
        measured = printed.report["hosts"][host]
        assert measured["gemm_gflops"]["float32"] > 1
        assert measured["gemm_gflops"]["bfloat16"] > 0.1
        assert measured["copy_gb_s"] > 0.5
        assert measured["cores"] == 1
    assert printed.report["pairs"]
    for pair in printed.report["pairs"]:
        assert pair["open"]
        assert pair["mtu"] == {"sent": 1500, "passes": 1500, "swallowed": False}
        assert 0 < pair["rtt_ms"]["median"] < 50
        assert pair["mbit"] > 100
        assert pair["allreduce_mbit"] > 50
    assert leftovers(lab) == before


def test_faults_of_different_kinds_are_found_in_one_look(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    faults = [next(fault for fault in FAULTS if fault.code == code) for code in TOGETHER]
    with ExitStack() as planted:
        for fault in faults:
            planted.enter_context(lab.planted(fault))
        printed = ask_doctor(lab.fleet, tmp_path, fails=True, data=dataset)
    for fault in faults:
        check(printed, fault, lab)
    assert not printed.report["good"]


def test_train_looks_at_a_changed_fleet_first(lab: Lab, dataset: Path) -> None:
    with lab.planted(UFW_RULE_GONE):
        refused = lab.fleet.play("train.yml", fails=True, run_id="unlooked", data_dir=dataset, **TINY)
    assert "Checking the paths between the hosts: " in refused.stdout
    assert "has no rule that lets" in refused.stdout
    assert not refused.results("Start the unit")


@pytest.mark.slow
def test_train_leaves_an_unchanged_fleet_and_doctor_an_active_run_alone(
    lab: Lab, dataset: Path, tmp_path: Path
) -> None:
    ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    settings = {**TINY, "steps": 4000, "data_dir": dataset}
    started = lab.fleet.play("train.yml", run_id="alone", **settings)
    try:
        assert "Checking the paths" not in started.stdout
        printed = ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
        assert printed.report["active_runs"] == {name: ["nanofleet-alone.service"] for name in lab.names}
        assert printed.report["pairs"]
        assert all(pair["open"] and pair["rtt_ms"] for pair in printed.report["pairs"])
        assert all(
            pair["mbit"] is None and pair["allreduce_mbit"] is None for pair in printed.report["pairs"]
        )
        assert "because nanofleet-alone.service is active (stop the run" in printed.text
        again = " ".join(lab.fleet.play("train.yml", run_id="alone", **settings).stdout.split())
        assert "The run alone is active" in again, "it still runs"
    finally:
        lab.fleet.play("stop.yml", run_id="alone", stop_now="true")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_is_named(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    rows, wrong = [], []
    for fault in FAULTS:
        inventory = lab.inventory_with(fault, tmp_path)
        fleet = Fleet(lab.fleet.workdir, inventory) if inventory else lab.fleet
        with lab.planted(fault):
            printed = ask_doctor(fleet, tmp_path, fails=fault.severity == "error", data=dataset)
        try:
            check(printed, fault, lab)
            assert printed.seconds < allowed_seconds(), f"{fault.name} took {printed.seconds:.0f} s"
        except AssertionError as error:  # all of them are shown: planting each takes minutes
            wrong.append(str(error))
        rows.append((fault, printed))
    good = ask_doctor(lab.fleet, tmp_path, fails=False, data=dataset)
    assert wrong == []
    page = ROOT / "docs" / "doctor.md"
    before, _mark, rest = page.read_text().partition("<!-- faults -->\n")
    _old, _mark, after = rest.partition("<!-- end -->")
    names = dict(zip(lab.names, ("tower", "laptop"), strict=True))

    def renamed(line: str) -> str:
        for name, other in names.items():
            line = line.replace(name, other)
        for address, other in zip(lab.addresses, ("10.0.0.1", "10.0.0.2"), strict=True):
            line = line.replace(address, other)
        # The lab's inventory, key and known_hosts are no part of what a person types.
        line = re.sub(r"(ansible-playbook) -i \S+", r"\1", line)
        return re.sub(r"\bssh( -[io] \S+)+", "ssh", line)

    page.write_text(f"{before}<!-- faults -->\n{table(rows, good, renamed)}\n<!-- end -->{after}")
