"""The console blocks of the documentation are those that were recorded."""

import pytest

from scripts import docs_console
from scripts.generated import stale

PRINTED = """
TASK [nanofleet.fleet.doctor : Report] *****
ok: [lab-1] =>
    msg: |-
        lab-1  10.9.9.1  good
        lab-22 10.9.9.2  good

        Nothing prevents training.

PLAY RECAP ****
lab-1 : ok=3
"""


def test_the_report_at_the_end_is_taken_without_the_tasks() -> None:
    report = docs_console.report(PRINTED)
    assert report.splitlines()[0].startswith("lab-1  10.9.9.1")
    assert report.splitlines()[-1] == "Nothing prevents training."


def test_a_short_report_is_one_line() -> None:
    assert (
        docs_console.report("ok: [a] => \n    msg: The run a is\n        stopped.\n\nTASK")
        == "The run a is stopped."
    )


def test_output_without_a_report_is_refused() -> None:
    with pytest.raises(docs_console.RecordError, match="no report"):
        docs_console.report("PLAY RECAP")


def test_hosts_have_the_names_of_the_tutorial_and_columns_stay() -> None:
    shown = docs_console.renamed(
        "lab-1    up 10.9.9.1\nlab-2    up", {"lab-1": "10.9.9.1", "lab-2": "10.9.9.2"}
    )
    assert shown == "tower    up 192.168.1.10\nlaptop   up"
    longer = docs_console.renamed("trial-1  up (on trial-1)", {"trial-1": "10.9.9.1", "trial-2": "10.9.9.2"})
    assert longer == "tower    up (on tower)"


def test_pages_show_what_was_recorded() -> None:
    assert not stale(docs_console.pages())


def test_every_record_is_of_a_command_that_is_recorded() -> None:
    for path in docs_console.RECORDED.glob("*.txt"):
        header, command = path.read_text().splitlines()[:2]
        assert command == f"$ {docs_console.COMMANDS[path.stem]}"
        assert "containers on one machine" in header
