"""The console's command line: inventories, a corpus, the demo, and the sentences for what cannot work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import ROOT, FleetError, corpus, demo, exchange, inventory
from fleet.__main__ import _interrupted, main, parser
from fleet.runview import RunView
from fleet.watch import places
from trainer.data.directory import prepare_corpus


class TestInventory:
    @pytest.mark.parametrize(
        ("own", "address"),
        [
            ({"ansible_host": "10.1.0.2", "ansible_user": "ops"}, "10.1.0.2"),
            ({"ansible_host": "10.1.0.2", "ansible_user": "ops", "fleet_address": "x"}, "x"),
            ({"ansible_user": "ops"}, "a"),
        ],
    )
    def test_the_coordinators_address(self, own: dict[str, str], address: str) -> None:
        listing = {"coordinator": {"children": ["first"]}, "first": {"hosts": ["a"]}}
        found = inventory.from_listing({**listing, "_meta": {"hostvars": {"a": own}}}, None)
        assert found == inventory.Coordinator(address, "ops")

    def test_no_coordinator_and_two_get_a_sentence(self) -> None:
        with pytest.raises(FleetError, match="no host in the group 'coordinator'"):
            inventory.from_listing({}, "my.yml")
        with pytest.raises(FleetError, match="2 coordinators"):
            inventory.from_listing({"coordinator": {"hosts": ["a", "b"]}}, "my.yml")

    def test_a_tracker_out_of_reach_comes_with_its_tunnel(self) -> None:
        printed = inventory.tracker(inventory.Coordinator("127.0.0.1", "ops", tracker_port=9))
        assert "ssh -N -L 9:127.0.0.1:9 ops@127.0.0.1" in printed

    @pytest.mark.parametrize(("extra", "port"), [([], 5050), (["-e", "tracker_port=6060"], 6060)])
    def test_the_trackers_port_is_the_inventorys_or_that_of_e(
        self, extra: list[str], port: int, tmp_path: Path
    ) -> None:
        hosts = tmp_path / "hosts.yml"
        hosts.write_text("coordinator: {hosts: {a: {ansible_host: 127.0.0.1, tracker_port: 5050}}}\n")
        view = RunView(coordinator="a", run_dir="/r")
        [page] = [where for name, where in places(view, str(hosts), extra) if name == "MLflow"]
        assert page.startswith(f"http://127.0.0.1:{port} ")


class TestCorpus:
    def test_machine_sources(self, tmp_path: Path) -> None:
        lib, share = tmp_path / "lib", tmp_path / "share"
        for folder in (
            "lib/json",
            "lib/test",
            "lib/site-packages",
            "share/doc",
            "share/man/man1",
            "share/man/de",
        ):
            (tmp_path / folder).mkdir(parents=True)
        (lib / "abc.py").write_text("x")
        (lib / "libx.so").write_text("x")
        found = [str(path.relative_to(tmp_path)) for path in corpus.machine_sources(share, lib)]
        assert found == ["lib/abc.py", "lib/json", "share/doc", "share/man/man1"]

    def test_this_machine_has_ten_megabytes(self) -> None:
        total = 0
        for source in corpus.machine_sources():
            for path in [source] if source.is_file() else source.rglob("*"):
                total += (
                    path.lstat().st_size if path.suffix in (".py", ".gz") and not path.is_symlink() else 0
                )
        assert total > 10_000_000

    def test_own_corpus_needs_text(self, tmp_path: Path) -> None:
        with pytest.raises(FleetError, match=r"There is no file or folder .*make demo CORPUS=dir"):
            corpus.own_sources(str(tmp_path / "none"))
        (tmp_path / ".hidden").write_text("text")
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
        (tmp_path / "blank.txt").write_text("\n\n")
        with pytest.raises(FleetError, match="has no text in it"):
            corpus.own_sources(str(tmp_path))
        (tmp_path / "story.md").write_text("Once")
        assert corpus.own_sources(str(tmp_path)) == [tmp_path.resolve()]


class TestDemo:
    def test_needs_linux_podman_and_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(FleetError, match="needs a Linux machine"):
            demo.check_machine("Darwin")
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)
        with pytest.raises(FleetError, match=r"podman is missing.*make lab-tools"):
            demo.check_machine("Linux")
        monkeypatch.setattr(demo.shutil, "which", lambda name: f"/usr/bin/{name}")
        with pytest.raises(FleetError, match=r"1\.0 GB are free at .* need 8 GB"):
            demo.check_machine("Linux", 1_000_000_000)
        demo.check_machine("Linux", 100_000_000_000)

    def test_without_root_and_sudo_it_reports_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo.os, "geteuid", lambda: 1000)
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)
        with pytest.raises(FleetError, match="there is no sudo"):
            demo.become_password()

    def test_an_empty_corpus_is_refused_before_anything_is_built(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo, "check_machine", lambda: None)
        monkeypatch.setattr(demo, "run_command", lambda *args: pytest.fail("something was built"))
        assert main(["demo", "--corpus", str(tmp_path)]) == 2
        assert "has no text in it" in capsys.readouterr().err

    def test_a_lab_of_another_name_has_its_own_places(self) -> None:
        other = demo.Demo(lab="mine")
        assert other.inventory.endswith(".lab/mine/inventory")
        assert other.down == "make lab-down LAB=mine"
        assert other.folder != demo.Demo().folder
        assert demo.Demo().inventory.endswith("inventory/lab")

    def test_commands_name_the_lab_if_ansible_would_read_another_inventory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("ANSIBLE_INVENTORY", raising=False)
        assert demo.Demo().where == ""
        monkeypatch.setenv("ANSIBLE_INVENTORY", "inventory/home")
        assert demo.Demo().where == "inventory/lab"
        assert demo.Demo().inventory == str(ROOT / "inventory/lab")

    def test_commands_after_ctrl_c_have_the_options_of_the_command(self, tmp_path: Path) -> None:
        args = parser().parse_args(["train", "-i", str(tmp_path / "hosts.yml"), "-K", "--run-id", "first"])
        printed = _interrupted(args)
        assert f"ansible-playbook -i {tmp_path}/hosts.yml -K stop.yml -e run_id=first" in printed
        args.started = True
        assert f"python -m fleet watch -i {tmp_path}/hosts.yml -K --run-id first\n" in _interrupted(args)

    def test_bad_numbers_get_a_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            parser().parse_args(["demo", "--depth", "deep"])
        assert stop.value.code == 2
        assert "'deep' is not a whole number above 0" in capsys.readouterr().err


def test_places_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "read", lambda where, extra: inventory.Coordinator("10.0.0.2"))
    monkeypatch.setattr(inventory, "tracker", lambda coordinator: f"http://{coordinator.address}:5000")
    view = RunView(coordinator="a", run_dir="/r", figures={"checkpoint": "checkpoints/step_000100"})
    assert places(view, None) == [
        ("checkpoint", "a:/r/checkpoints/step_000100"),
        ("log", "a:/r/train.log"),
        ("MLflow", "http://10.0.0.2:5000"),
    ]


def test_without_the_venv_there_is_a_sentence() -> None:
    """A Python that has neither rich nor Ansible."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "fleet", "watch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "make venv" in done.stderr
    assert "Traceback" not in done.stderr


class TestExchange:
    TEXT = (
        "import os\n\nThe quick brown fox jumps over the lazy dog again and again. See x.y for more. The old "
        "man went down to the harbour and looked at ships. Nobody had ever seen a house as small as this."
    )

    def test_sentences_become_questions_about_how_they_continue_run(self) -> None:
        found = list(exchange.sentences(iter([self.TEXT, self.TEXT])))
        assert [each.split()[0] for each in found] == ["The", "The", "Nobody"], "each once"
        ask, answer = exchange.conversation(found[0])
        assert ask["content"] == "How does this sentence continue? The quick brown fox jumps ..."
        assert answer["content"] == "over the lazy dog again and again."

    def test_the_questions_that_are_asked_are_not_in_the_file(self, tmp_path: Path) -> None:
        nouns = ("ship", "house", "tree", "man", "dog", "cat", "bird", "fox", "hill", "sea", "sun", "moon")
        lines = [f"A {a} saw the {b} from far away in the long evening." for a in nouns for b in nouns]
        lines += [f"The {noun} stood there alone for a very long time." for noun in nouns]
        for number, line in enumerate(lines):
            (tmp_path / f"{number}.txt").write_text(line)
        prepare_corpus([tmp_path], tmp_path / "data", vocab_size=300)
        asked = exchange.make_conversations(tmp_path / "data", tmp_path / "chats.jsonl")
        assert len(asked) == exchange.HELD_OUT
        assert all("? The " in question for question in asked)
        written = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
        assert not set(asked) & {each[0]["content"] for each in written}

    def test_the_address_is_that_of_serve_yml(self) -> None:
        notes = ["first answers on a. Page: http://10.0.0.2:8000/  API: http://10.0.0.2:8000/v1"]
        assert exchange.served_at(notes) == "http://10.0.0.2:8000"
        with pytest.raises(FleetError, match="did not report"):
            exchange.served_at(["nothing"])

    def test_a_model_that_does_not_answer_gets_a_sentence(self) -> None:
        with pytest.raises(FleetError, match=r"The model at http://127\.0\.0\.1:9 did not answer"):
            exchange.ask("http://127.0.0.1:9", "What?")
