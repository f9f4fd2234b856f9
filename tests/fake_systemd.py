"""Fake systemctl and systemd-run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry, unit_end


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake tools on PATH that keep one unit's state in a file and note every command line."""
    tools = tmp_path / "bin"
    tools.mkdir()
    state, calls = tmp_path / "state", tmp_path / "calls"
    state.write_text("inactive")
    calls.touch()
    note = f'printf "%s\\n" "$(basename "$0") $*" >> {calls}\n'
    (tools / "systemctl").write_text(
        "#!/bin/sh\n"
        + note
        + f"""
[ "$1" = --user ] && shift
case "$1" in
  show) s=$(cat {state}); echo "ActiveState=$s"; echo LoadState=loaded; echo SubState=x; echo Result=exit-code
        echo MainPID=41; echo ExecMainStatus=1; echo NRestarts=0
        echo StateChangeTimestampMonotonic=1000000 ;;
  stop) [ -e {tmp_path}/stubborn ] || echo inactive > {state} ;;
  reset-failed) echo inactive > {state} ;;
  list-units) echo "nanofleet-a.service loaded $(cat {state}) x run"
              echo "nanofleet-tracker.service loaded active x t" ;;
esac
"""
    )
    (tools / "systemd-run").write_text(
        "#!/bin/sh\n"
        + note
        + f"[ -e {tmp_path}/refuse ] && {{ echo 'Bad thing' >&2; exit 1; }}\necho active > {state}\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        boot_entry, "_folders", lambda _scope: (str(tmp_path / "etc"), str(tmp_path / "units"))
    )
    # A lab on this machine may have a unit of that name, whose processes are this machine's.
    monkeypatch.setattr(unit_end, "processes_of", lambda _name, _scope: [])
    return tmp_path


def called(systemd: Path, tool: str) -> list[str]:
    return [line for line in (systemd / "calls").read_text().splitlines() if line.startswith(tool)]
