"""Elections between hosts over loopback, the file with the term, and messages that must have no effect."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from conftest import free_port

from trainer.checkpoint.storage import TrainState
from trainer.config import ConfigError, RunConfig, RunFile
from trainer.data.dataset import Dataset
from trainer.elastic import candidacy
from trainer.elastic.candidacy import Candidacy, Signer, read_term
from trainer.elastic.election import NONE, Notice
from trainer.elastic.setup import Inputs
from trainer.elastic.train import ElasticTrainer, LastTerm
from trainer.health.attempt import Attempt
from trainer.health.attempt_history import has_stepped
from trainer.host.logger import RunLogger
from trainer.host.numerics import Numerics, Options
from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable

HOSTS = ("tower", "laptop", "attic")
RUN = RunFile("a", RunConfig(elastic="true"), HOSTS)
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    path.write_text("01" * 32)
    monkeypatch.setenv("NANOFLEET_SECRET_FILE", str(path))
    return path


def host(number: int, port: int, folder: Path, run: RunFile = RUN) -> Candidacy:
    env = RankEnv(number, 3, 0, 1, HOSTS[number], "127.0.0.1", port, addresses=ADDRESSES)
    run_dir = folder / HOSTS[number]
    run_dir.mkdir(exist_ok=True)
    return Candidacy(env, run, run_dir, RunLogger(env))


def elected(hosts: dict[int, Candidacy]) -> dict[int, RankEnv]:
    """The environments after an election between these hosts."""
    found: dict[int, RankEnv] = {}
    threads = [
        threading.Thread(target=lambda number=number, each=each: found.update({number: each.elect()}))  # type: ignore[misc]
        for number, each in hosts.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def close(hosts: dict[int, Candidacy]) -> None:
    for each in hosts.values():
        each.close()


@pytest.mark.processes
def test_a_host_that_was_added_follows_who_is_elected_and_is_not_counted(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    env = RankEnv(4, 3, 0, 1, "cellar", "127.0.0.1", port, addresses=ADDRESSES)
    added = Candidacy(env, RUN, tmp_path, RunLogger(env))
    hosts = {0: host(0, port, tmp_path), 4: added}
    monkeypatch.setattr(candidacy, "FIRST_SECONDS", 3.0)
    with pytest.raises(Retryable, match="gets no answer from laptop, attic"):
        hosts[0].elect()
    with pytest.raises(Retryable, match="No coordinator is elected: 2 of 3 hosts are needed"):
        added.elect()
    hosts[1] = host(1, port, tmp_path)
    found = elected(hosts)
    assert {number: env.rank for number, env in found.items()} == {0: 0, 1: 1, 4: 4}
    assert (found[4].launch_rank, found[4].master_addr) == (4, "127.0.0.1")
    assert found[4].master_port == found[1].master_port
    close(hosts)


def test_hosts_elect_the_first_one_then_the_next(tmp_path: Path, secret: Path) -> None:
    port = free_port()
    hosts = {number: host(number, port, tmp_path) for number in range(3)}
    first = elected(hosts)
    assert [first[number].rank for number in range(3)] == [0, 1, 2]
    assert len({env.master_port for env in first.values()}) == 1
    assert first[1].master_port not in (0, port)
    assert hosts[0].expected() is None, "all are waited for"
    close(hosts)

    hosts = {number: host(number, port, tmp_path) for number in (1, 2)}
    second = elected(hosts)
    assert {number: env.rank for number, env in second.items()} == {1: 0, 2: 1}
    assert {env.master_addr for env in second.values()} == {"127.0.0.2"}
    assert {number: env.launch_rank for number, env in second.items()} == {1: 1, 2: 2}
    assert hosts[1].expected() == [0, 1], "the host that is lost is not waited for"
    for number in (1, 2):
        content = json.loads((tmp_path / HOSTS[number] / "term.json").read_text())
        assert content == {"term": 1, "coordinator": "laptop", "hosts": list(HOSTS)}
    close(hosts)


def test_a_run_of_another_name_or_secret_takes_no_part(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    hosts = {0: host(0, port, tmp_path), 1: host(1, port, tmp_path, dataclasses.replace(RUN, run_id="b"))}
    secret.write_text("02" * 32)
    hosts[2] = host(2, port, tmp_path)
    time.sleep(1.0)
    for each in hosts.values():
        assert each.election.decide() is None
        assert len(each.election.reached()) == len(each.election.seen()) == 1
    monkeypatch.setattr(candidacy, "FIRST_SECONDS", 0.0)
    with pytest.raises(Retryable, match="gets no answer from tower at port"):
        hosts[1].elect()
    close(hosts)


def test_a_message_that_is_repeated_has_no_effect(tmp_path: Path, secret: Path) -> None:
    port = free_port()
    hosts = {0: host(0, port, tmp_path)}
    signer = Signer(b"\x01" * 32, RUN)
    notice = dataclasses.asdict(Notice(1, NONE, NONE, (0, 1), 0))

    def ask(nonce: str = "") -> str:
        """The answer of host 0 to a notice of host 1, signed for `nonce`; "": for the one that it sends."""
        with socket.create_connection(("127.0.0.1", port), 2.0) as connection, connection.makefile() as lines:
            theirs = nonce or json.loads(lines.readline())["nonce"]
            message = {
                "nonce": "mine",
                "notice": notice,
                "signature": signer.sign("ask", theirs, "mine", notice),
            }
            connection.sendall(json.dumps(message).encode() + b"\n")
            if nonce:
                lines.readline()
            return lines.readline()

    assert ask("0" * 32) == "", "it was signed for another connection"
    assert hosts[0].election.seen() == [0]
    assert json.loads(ask())["notice"]["host"] == 0
    assert hosts[0].election.seen() == [0, 1]
    close(hosts)


def test_a_port_in_use_is_named(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidacy, "PORT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(Retryable, match=rf"tower cannot listen at 127.0.0.1:{port}: Address already"):
            host(0, port, tmp_path)


def test_an_address_that_the_host_has_lost_is_named(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidacy, "PORT_SECONDS", 0.0)
    monkeypatch.setitem(globals(), "ADDRESSES", ("192.0.2.7",) * 3)
    with pytest.raises(Retryable, match="The host had this address when the run was started"):
        host(0, 1, tmp_path)


def test_the_term_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "term.json"
    assert read_term(path, HOSTS) == NONE
    path.write_text(json.dumps({"term": 4, "coordinator": "laptop", "hosts": HOSTS}))
    assert read_term(path, HOSTS) == 4
    assert read_term(path, (*HOSTS, "cellar")) == 4, "the next one of tower"
    assert read_term(path, HOSTS[:2]) == 4
    assert read_term(path, ("tower", "attic", "laptop")) == 6
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"term\.json is damaged"):
        read_term(path, HOSTS)


def test_a_rank_that_cannot_join_the_next_term_has_made_steps(tmp_path: Path, secret: Path) -> None:
    """Else its unit would not start again: of a first attempt without a step, a person reads why."""
    env = RankEnv(1, 3, 0, 1, HOSTS[1], "127.0.0.1", free_port(), addresses=ADDRESSES)
    run_dir, log = tmp_path / "run", RunLogger(env)
    attempt = Attempt(run_dir, env)
    attempt.begin()
    trainer = ElasticTrainer(RUN, tmp_path, run_dir, env, attempt, log)
    data, state = object.__new__(Dataset), TrainState(step=61, loss=2.5)
    inputs = Inputs(data, None, Options(Numerics.__new__(Numerics), None, 0, {}))
    last = LastTerm(None, None, inputs, trainer.checkpoint_writer, state, time.monotonic())
    assert not has_stepped(run_dir)
    trainer.take_part(Candidacy(env, RUN, run_dir, log), last)
    assert has_stepped(run_dir)
    assert trainer.setup.open_data() is data, "it is verified only once in a process"
    attempt.end("retryable", "The run has ended: only two hosts can train.")
    assert json.loads((run_dir / "outcome.json").read_text())["step"] == 61


def test_which_runs_have_failover() -> None:
    def failover(hosts: int, **settings: object) -> bool:
        return RunConfig.from_strings({"elastic": True, **settings}).has_failover(hosts)

    assert (failover(2), failover(3)) == (False, True)
    assert failover(2, coordinator_failover=True)
    assert not failover(3, coordinator_failover="false")
    assert not failover(3, elastic="false", coordinator_failover="true")
    with pytest.raises(ConfigError, match="coordinator_failover"):
        RunConfig.from_strings({"coordinator_failover": "maybe"})
    quorums = {hosts: RunConfig(elastic="true").quorum(hosts) for hosts in (2, 3, 4, 5, 64)}
    assert quorums == {2: 1, 3: 2, 4: 3, 5: 3, 64: 33}
    assert RunConfig(elastic="true", min_hosts=3).quorum(3) == 3


def test_ranks_are_counted_from_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFLEET_RANKS", "2 3 127.0.0.1:20999 127.0.0.1 127.0.0.2 127.0.0.3")
    env = RankEnv.from_environment()
    assert (env.rank, env.world_size, env.master_port, env.addresses) == (2, 3, 20999, ADDRESSES)
    moved = env.coordinated_by(1, 20500)
    assert (moved.rank, moved.launch_rank, moved.master_addr) == (1, 2, "127.0.0.2")
    again = moved.coordinated_by(2, 20501)
    assert (again.rank, again.launch_rank, again.is_coordinator) == (0, 2, True)


def test_several_ranks_of_a_host_follow_its_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFLEET_RANKS", "4 6 127.0.0.1:20999 127.0.0.1 127.0.0.2 127.0.0.3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    env = RankEnv.from_environment()
    assert (env.rank, env.host_index, env.has_vote) == (5, 2, False)
    moved = env.coordinated_by(2, 20500)
    assert (moved.rank, moved.launch_rank, moved.host_index) == (1, 5, 2)
    assert not moved.is_coordinator
    again = moved.coordinated_by(1, 20501)
    assert (again.rank, again.launch_rank, again.master_addr) == (3, 5, "127.0.0.2")
    assert list(env.voting) == [0, 2, 4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(
        ConfigError, match="all hosts need the same nproc_per_node: set it for the group fleet"
    ):
        RankEnv.from_environment()
