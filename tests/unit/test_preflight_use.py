"""What preflight says of how a host is used: other work, sleep, battery, ports in other hands."""

import pytest
from port_range import DASHED
from preflight_probe import AWAKE, GOOD, ROOT_OK, host, put, reported


def test_other_work_is_named_with_its_owner() -> None:
    busy = put(GOOD, load="7.52") + "busy=398 812 ada ffmpeg\nbusy=99 4711 ada firefox-esr\n"
    [found] = reported(busy)
    assert found["severity"] == "warning"
    assert found["problem"] == (
        "Other programs use the processor of this host: ffmpeg (398 %, PID 812 of ada), "
        "firefox-esr (99 %, PID 4711 of ada). The load is 7.52 on 4 cores, so training would be slow."
    )
    assert found["remedy"] == (
        "lower its priority: sudo renice -n 19 -p $(ls /proc/812/task), or end it: sudo kill 812  (on laptop)"
    )
    assert host(put(GOOD, load="7.52")) == [
        (
            "Other programs use the processor of this host. The load is 7.52 on 4 cores, so training would "
            "be slow.",
            "end programs that are not needed: sudo kill PID  (on laptop; top lists them with their PID)",
        )
    ]
    assert host(busy + "active=nanofleet-d8-1a2b3c4d.service\n") == []
    [(problem, remedy)] = host(put(GOOD, load="7.52") + "busy=14.0 1 root systemd\n")
    assert "systemd" not in problem
    assert "kill 1 " not in remedy


def test_a_lid_that_puts_it_to_sleep() -> None:
    [found] = reported(AWAKE)
    assert found["severity"] == "warning"
    assert found["problem"] == (
        "This host goes to sleep when its lid is closed. A run keeps it awake while it trains, "
        "but not while it waits to restart after a failure. An elastic run continues without it when the lid "
        "is closed."
    )
    assert found["remedy"].startswith("printf '[Login]\\nHandleLidSwitch=ignore\\n")
    assert "IdleAction" not in found["remedy"]
    [(problem, _)] = host(AWAKE, variables={"ansible_become": False})
    assert problem.endswith("A run without root access cannot keep it awake.")
    [(problem, _)] = host(AWAKE, holds_sleep=False)
    assert problem.endswith("The setting launch_inhibit_sleep=false allows that during a run.")


@pytest.mark.parametrize(
    "changed",
    [
        {"HandleLidSwitch": "ignore"},
        {"HandleLidSwitch": "lock"},
        {"HandleLidSwitchExternalPower": "ignore"},  # and it is on its mains
        {"chassis": "3", "battery": ""},  # a desktop
        {"sleep": "masked"},
        {"suspend": "masked"},
    ],
)
def test_what_has_no_lid_or_does_nothing_about_it(changed: dict[str, str]) -> None:
    assert host(put(AWAKE, **changed)) == []


def test_idling_that_puts_a_desktop_to_sleep() -> None:
    desktop = put(AWAKE, chassis="3", battery="")
    [(problem, remedy)] = host(put(desktop, IdleAction="suspend"))
    assert "when nobody uses it for a while" in problem
    assert "IdleAction=ignore" in remedy
    assert "Lid" not in remedy
    [(problem, remedy)] = host(put(desktop, desktop_idle="suspend"))
    assert "when nobody uses it for a while" in problem
    assert remedy.startswith("gsettings set ")


def test_a_laptop_on_its_battery() -> None:
    [found] = reported(put(GOOD, battery="Discharging 63", mains="0"))
    assert found["severity"] == "warning"
    assert found["problem"] == (
        "This host runs on its battery, 63 % full. It turns off when the battery is empty."
    )
    assert host(put(GOOD, battery="Charging 63", mains="1")) == []


def test_a_port_in_other_hands() -> None:
    squatter = "port=store 29500 2537 root squatter.service /usr/bin/python3 -m http.server 29500\n"
    [found] = reported(root=ROOT_OK + squatter)
    assert found["severity"] == "refusal"
    assert found["problem"] == (
        "Port 29500, which the rendezvous store of a run (TCPStore of torchrun) needs, is in use by process "
        "2537 of root (/usr/bin/python3 -m http.server 29500), unit squatter.service."
    )
    assert found["remedy"] == (
        "sudo systemctl stop squatter.service  (on laptop); or use another port: write store_port: PORT into "
        "group_vars/fleet.yml of the inventory, then: ansible-playbook setup.yml"
    )
    assert host(root=ROOT_OK + squatter.replace("squatter.service", "nanofleet-d8-1a2b3c4d.service")) == []
    [(_, remedy)] = host(root=ROOT_OK + squatter.replace("squatter.service", "-"))
    assert remedy.startswith("sudo kill 2537")
    [(problem, remedy)] = host(root=ROOT_OK + "port=tracker 5000\n")
    assert problem == (
        "Port 5000, which the tracker (MLflow) needs, is in use by a process that only root can name."
    )
    assert "write tracker_port: PORT into" in remedy
    assert host(root=ROOT_OK + "port=tracker 5000 - nanofleet nanofleet-tracker.service\n") == []
    [(problem, remedy)] = host(root=ROOT_OK + "port=store 29500 - ada squatter.service\n")
    assert problem.endswith("needs, is in use by squatter.service of ada.")
    assert remedy.startswith("sudo systemctl stop squatter.service")
    [(problem, remedy)] = host(root=ROOT_OK + "port=store 29500 1 root init.scope /sbin/init\n")
    assert "systemd itself" in problem
    assert "kill" not in remedy


def test_a_range_that_is_nearly_used_up() -> None:
    [found] = reported(root=put(ROOT_OK, range=f"{DASHED} 940 900 812 ada - ./crawler"))
    assert found["severity"] == "warning"
    assert found["problem"].startswith(
        f"940 of the 1000 ports {DASHED} of this host are in use, 900 of them by process 812 of ada "
        "(./crawler)"
    )
    assert host(root=put(ROOT_OK, range=f"{DASHED} 700 700 812 ada - ./crawler")) == []


def test_a_unit_file_of_the_runs_name() -> None:
    path = "/etc/systemd/system/nanofleet-d8.service"
    [found] = reported(root=put(ROOT_OK, unit=path))
    assert found["severity"] == "refusal"
    assert f"A unit file {path} exists on this host" in found["problem"]
    assert host(root=put(ROOT_OK, unit="/run/systemd/transient/nanofleet-d8.service")) == []
