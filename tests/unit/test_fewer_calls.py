"""Modules that do in one call what several did: the reading before a start, the start, what is known."""

from __future__ import annotations

import getpass
import hashlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.action import doctor_peers as peers_action
from ansible_collections.nanofleet.fleet.plugins.action import network_links as links_action
from ansible_collections.nanofleet.fleet.plugins.module_utils import claim_file
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_listener import Listener, open_ports
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_prober import PeerPath, end
from ansible_collections.nanofleet.fleet.plugins.module_utils.project_sources import sources_digest
from ansible_collections.nanofleet.fleet.plugins.modules import launch_state, network_links, start_run
from fake_systemd import called
from role_files import call


def asked(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Options of launch_state on a host without a run."""
    (tmp_path / "manifest.json").write_text("{}")
    return {
        "targets": ["127.0.0.1"], "state_dir": str(tmp_path), "user": getpass.getuser(), "run_id": "a",
        "manifest": str(tmp_path / "manifest.json"), "python": sys.executable, **changes,
    }  # fmt: skip


def test_a_host_is_read_in_one_call(systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = call(launch_state, monkeypatch, **asked(tmp_path))
    assert not read["failed"]
    assert read["network_links"]["routes"]["127.0.0.1"]["interface"] == "lo"
    assert (read["run_state"]["run_id"], read["run_state"]["found"]) == ("a", False)
    assert read["run_state"]["manifest_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert read["installed_environment"]["installed"]["python"]
    assert "verify_shards" not in read


def test_what_cannot_be_read_is_left_to_its_own_module(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    read = call(launch_state, monkeypatch, **asked(tmp_path, python=str(python), data=str(tmp_path)))
    assert not read["failed"]
    assert {"network_links", "run_state"} <= read.keys()
    assert not {"installed_environment", "verify_shards"} & read.keys()


def test_what_is_known_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"links": [], "routes": {"10.0.0.2": {}}, "wireless": [], "slow_names": []}
    assert call(network_links, monkeypatch, targets=["10.0.0.2"], known=known)["routes"] == known["routes"]
    calls: list[dict[str, Any]] = []

    def act(action: Any, **args: Any) -> dict[str, Any]:
        made = action.ActionModule.__new__(action.ActionModule)
        made._task = SimpleNamespace(args=args, action="nanofleet.fleet.x")
        monkeypatch.setattr("ansible.plugins.action.ActionBase.run", lambda *_args, **_more: {})
        answer = {"routes": {}, "peers": {"tower": {"sent_mbit": 2.0}}}
        monkeypatch.setattr(made, "_execute_module", lambda _name, given, **_: calls.append(given) or answer)
        found: dict[str, Any] = made.run(None, {})
        return found

    assert act(links_action, targets=["10.0.0.2"], known=known)["routes"] == known["routes"]
    assert act(peers_action, token="t", peers=[], before={"den": {}})["peers"] == {"den": {}}
    assert calls == []
    act(links_action, targets=["10.0.0.2"], known={})
    assert calls == [{"targets": ["10.0.0.2"]}]
    both = act(peers_action, token="t", peers=[{"host": "tower"}], before={"den": {}})
    assert set(both["peers"]) == {"den", "tower"}


def test_a_start_writes_the_files_and_starts_the_unit_once(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, script = tmp_path / "runs" / "a", tmp_path / "unit"
    run_dir.mkdir(parents=True)
    (run_dir / "outcome.json").write_text("{}")
    wanted: dict[str, Any] = {
        "name": "nanofleet-a", "run_dir": str(run_dir), "argv": [str(script), "run"],
        "folder": {"files": {"run.json": "{}\n"}, "remove": ["outcome.json"]},
        "script": {"path": str(script), "text": "#!/bin/bash\n"},
    }  # fmt: skip
    would = call(start_run, monkeypatch, check=True, **wanted)
    assert would["changed"]
    assert not script.exists()
    assert call(start_run, monkeypatch, **wanted)["changed"]
    assert json.loads((run_dir / "run.json").read_text()) == {}
    assert not (run_dir / "outcome.json").exists()
    assert script.stat().st_mode & 0o777 == 0o755
    assert len(called(systemd, "systemd-run ")) == 1
    assert not call(start_run, monkeypatch, **wanted)["changed"]
    script.chmod(0o700)
    assert call(start_run, monkeypatch, **wanted)["changed"]
    outside = {**wanted, "folder": {"files": {"../x": ""}}}
    assert "must not contain a folder" in call(start_run, monkeypatch, **outside)["msg"]
    nobody = call(start_run, monkeypatch, **{**wanted, "user": "no-such-user"})
    assert "ansible-playbook setup.yml" in nobody["msg"]


def test_claims_that_were_read_elsewhere_are_refused_alike() -> None:
    hosts = {"tower": "10.0.0.1", "laptop": "10.0.0.2"}
    who = {"by": "a", "at": "b", "controllers": None, "controller": ""}
    own = claim_file.claim_text({}, {"fleet_id": "home", "hosts": hosts, **who})
    texts = {"tower": own, "laptop": ""}
    assert claim_file.refusals(texts, "home", hosts) == []
    assert claim_file.refusals(texts, "den", {"tower": "10.0.0.1"}, True) == []
    [message] = claim_file.refusals(texts, "den", {"tower": "10.0.0.1"})
    assert "tower serves the fleet home" in message
    [damaged] = claim_file.refusals({"tower": "{"}, "home", hosts)
    assert "sudo rm /opt/nanofleet/fleet.json  (on tower)" in damaged


def test_a_listener_ends_when_all_its_callers_are_done() -> None:
    listener = Listener("tower", "t" * 32, limit=20, idle=20, callers=1)
    opened, held = open_ports(listener, "127.0.0.1", 0, [])
    assert held == []
    served = threading.Thread(target=listener.serve)
    served.start()
    end(PeerPath("tower", "127.0.0.1", "t" * 32), opened, "laptop")
    served.join(5)
    assert not served.is_alive()


def test_sources_have_another_digest_after_any_change(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.hatch.build.targets.wheel]\npackages = ["a"]\n')
    (tmp_path / "a" / "__pycache__").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "a" / "x.py").write_text("x = 1\n")
    first = sources_digest(tmp_path)
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "other" / "y.py").write_text("")
    assert sources_digest(tmp_path) == first
    digests = {first}
    for change in (
        lambda: (tmp_path / "a" / "x.py").write_text("x = 2\n"),
        lambda: (tmp_path / "a" / "z.py").write_text(""),
        lambda: (tmp_path / "README.md").write_text("words"),
        lambda: (tmp_path / "a" / "x.py").chmod(0o755),
    ):
        change()
        digests.add(sources_digest(tmp_path))
    assert len(digests) == 5
