"""Doctor's report: its JSON, the matrix and the lines on the screen."""

from __future__ import annotations

import json

from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_measured as doctor
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_report as report
from measured_fleet import all_findings, close_ports, fleet, predict

ABOUT = {"time": 1.0, "seconds": 12.34, "quick": False, "rehearsal": {"hosts": [], "why": ""}}


def test_the_report_has_what_a_program_needs_and_survives_json() -> None:
    measured = fleet("tower", "laptop")
    made = json.loads(json.dumps(report.report(measured, [], ABOUT)))
    assert (made["schema"], made["good"], made["seconds"]) == (2, True, 12.3)
    assert made["hosts"]["laptop"]["gemm_gflops"] == {"float32": 200.0, "bfloat16": 900.0}
    assert made["hosts"]["laptop"]["copy_gb_s"] == 12.5
    pairs = {(pair["from"], pair["to"]): pair for pair in made["pairs"]}
    assert pairs["tower", "laptop"]["mbit"] == 940
    assert pairs["laptop", "tower"]["mbit"] == 930
    assert pairs["laptop", "tower"]["allreduce_mbit"] == pairs["tower", "laptop"]["allreduce_mbit"] == 701
    assert pairs["tower", "laptop"]["open"]
    assert made["not_measured"] == []


def test_the_screen_has_one_matrix_and_one_line_a_finding() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "laptop", "tower", "filtered", "store")
    measured["laptop"]["facts"]["load"] = 9.0
    made = report.report(measured, all_findings(measured), ABOUT)
    lines = report.text(made).splitlines()
    assert lines[0].split() == ["from", "\\", "to", "tower", "laptop"]
    assert sum(line.startswith("FAULT  NF527  tower: ") for line in lines) == 1
    assert sum(line.startswith("warning  NF508  laptop: ") for line in lines) == 1
    assert all(" Fix: " in line for line in lines if line.startswith(("FAULT", "warning")))
    assert lines[-1] == "1 finding prevents training, 1 warning. The check took 12 s and changed nothing."
    assert any("store ports filtered" in line for line in lines)
    assert any("fp32 200, bf16 900 GFLOP/s" in line for line in lines)
    assert any("0.20 ms, packets to 1500" in line for line in lines)
    assert not made["good"]


def test_a_rate_that_was_not_measured_is_left_out() -> None:
    measured = fleet("tower", "laptop")
    for of_host in measured.values():
        del of_host["rehearsal"]["gemm_gflops"]["bfloat16"]
    text = report.text(report.report(measured, [], ABOUT))
    assert "fp32 200 GFLOP/s" in text
    assert "bf16" not in text


def test_warnings_alone_do_not_prevent_training() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["resolves_to"] = ["127.0.1.1"]
    made = report.report(measured, all_findings(measured), ABOUT)
    assert made["good"]
    assert report.text(made).splitlines()[-1].startswith("Nothing prevents training, 1 warning.")


def test_what_was_not_measured_is_listed() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["active"] = ["nanofleet-d8.service"]
    (printed,) = report.report(measured, [], ABOUT)["not_measured"]
    assert "nanofleet-d8.service is active" in printed
    measured = fleet("tower", "laptop")
    for of_host in measured.values():
        of_host.update(installed=None, rehearsal=None, data={"findings": ["manifest.json is missing"]})
    why = doctor.can_rehearse(list(measured), measured, 16)
    printed = "; ".join(report.report(measured, [], {**ABOUT, "rehearsal": why})["not_measured"])
    assert "setup.yml" in printed
    assert "data of tower, laptop" in printed
    assert "doctor.yml" in report.report(fleet("tower"), [], {**ABOUT, "quick": True})["not_measured"][0]


def test_a_prediction_is_in_the_report_or_why_there_is_none() -> None:
    measured = fleet("tower", "laptop")
    predict(measured)
    made = report.report(measured, [], ABOUT)
    assert made["predicted"]["modes"]["dense"] == {"network_s": 42.4, "step_s": 50.1}
    assert made["not_measured"] == []
    for why, words in (("shares is 3", "shares is 3"), ("", "tower did not end in time")):
        measured["tower"]["rehearsal"].update(predicted=None, prediction_error=why)
        made = report.report(measured, [], ABOUT)
        assert (made["predicted"], made["not_measured"]) == (None, [f"the speed of a step: {words}"])


def test_a_host_that_does_not_answer_has_its_place_in_the_matrix() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(
        reachable=False, facts={}, paths={}, rates={}, installed=None, data=None, rehearsal=None
    )
    lines = report.matrix(report.report(measured, [], ABOUT))
    assert any("does not answer" in line for line in lines)
