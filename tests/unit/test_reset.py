"""What reset.yml says: every host's losses and what it keeps, and how to continue."""

from pathlib import Path

from ansible_collections.nanofleet.fleet.plugins.module_utils import reset_report as reset

ROLE = Path(__file__).resolve().parents[2] / "roles" / "reset"

HOSTVARS = {
    "tower": {
        "run_remove_removed": ["unit nanofleet-d8.service"],
        "run_remove_kept": ["/var/lib/nanofleet/runs"],
        "runtime_removed": ["/opt/nanofleet", "/opt/nanofleet"],
        "runtime_left": ["/opt/nanofleet/notes"],
    },
    "laptop": {"run_remove_removed": [], "runtime_removed": []},
}


def test_a_dry_run_shows_what_would_go_and_how_to_do_it() -> None:
    lines = reset.report(["tower", "laptop"], HOSTVARS, False, [])
    assert lines[:5] == [
        "tower: would remove unit nanofleet-d8.service",
        "tower: would remove /opt/nanofleet",
        "tower: would keep (owned by root from then on): /var/lib/nanofleet/runs",
        "tower: not removed, not made by setup.yml: /opt/nanofleet/notes",
        "laptop: nothing of setup.yml is left.",
    ]
    assert "reset_checkpoints=true" in lines[5]
    assert lines[-2].startswith("Nothing was changed.")
    assert lines[-1] == "To do it, repeat the command with -e reset_confirm=true"


def test_a_dry_run_shows_that_an_active_run_would_have_it_refused() -> None:
    hostvars = {host: {**HOSTVARS["tower"], "run_remove_active": ["d8"]} for host in ("tower", "laptop")}
    lines = reset.report(["tower", "laptop"], hostvars, False, [])
    assert lines[-4:-2] == [
        "A run is active on tower, laptop (d8), so the reset would be refused.",
        "To save and stop it first: ansible-playbook stop.yml -e run_id=d8",
    ]
    assert "-e reset_force=true" in lines[-2]
    forced = reset.report(["tower", "laptop"], hostvars, False, [], True)
    assert (
        forced[-2]
        == "A run is active on tower, laptop (d8): the reset would end it without saving a checkpoint."
    )
    assert not any("would be refused" in line for line in reset.report(["tower"], hostvars, True, []))


def test_a_reset_shows_what_went_and_what_stays_on_the_controller() -> None:
    lines = reset.report(["tower"], HOSTVARS, True, ["/home/me/nanofleet/.wheelhouse"])
    assert "tower: removed /opt/nanofleet" in lines
    assert "tower: kept (now owned by root): /var/lib/nanofleet/runs" in lines
    assert lines[-1].endswith("rm -r /home/me/nanofleet/.wheelhouse")


def test_where_nothing_is_left_there_is_nothing_to_confirm() -> None:
    lines = reset.report(["laptop"], HOSTVARS, False, [])
    assert lines == [
        "laptop: nothing of setup.yml is left.",
        "setup.yml installs no system packages, so none is removed.",
    ]
