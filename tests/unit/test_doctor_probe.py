"""Doctor's listener and prober against each other on loopback, and what its modules read."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import peer_listener as listening
from ansible_collections.nanofleet.fleet.plugins.module_utils import peer_prober as probing
from ansible_collections.nanofleet.fleet.plugins.modules import doctor_host as host
from role_files import with_collection

ROLE = Path(__file__).resolve().parents[2] / "roles" / "doctor"
TOKEN = secrets.token_hex(16)  # its control socket has one name on this machine


@pytest.fixture
def served() -> Iterator[tuple[Any, int]]:
    """A listener called laptop in a thread, and the port it has."""
    listener = listening.Listener("laptop", TOKEN, limit=20)
    port = listener.open("127.0.0.1", 0)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    yield listener, port
    assert listening.stop(TOKEN)
    thread.join(5)
    assert not thread.is_alive()


def path(peer: str = "laptop", token: str = TOKEN, seconds: float = 0.5) -> Any:
    return probing.PeerPath(peer, "127.0.0.1", token, connect_seconds=seconds)


# -- one port ----------------------------------------------------------------------------------------------


def test_an_open_port_shows_who_answers_and_how_we_are_seen(served: tuple[Any, int]) -> None:
    found = path().reach(served[1])
    assert (found["state"], found["seen"]) == ("open", "127.0.0.1")
    assert found["ms"] < 500


def test_another_hosts_answer_is_misrouted_and_names_it(served: tuple[Any, int]) -> None:
    found = path(peer="attic").reach(served[1])
    assert (found["state"], found["detail"]) == ("misrouted", "laptop")


def test_a_caller_without_the_token_gets_no_answer(served: tuple[Any, int]) -> None:
    with socket.create_connection(("127.0.0.1", served[1]), timeout=3) as connection:
        connection.sendall(b'{"token": "guess", "do": "hello"}\n')
        assert connection.recv(100) == b""


def test_a_port_nobody_listens_on_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert path().reach(unused.getsockname()[1])["state"] == "refused"


def test_a_port_that_swallows_packets_is_filtered() -> None:
    """A full backlog drops SYNs without a word, as a firewall's DROP does."""
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        first.connect(("127.0.0.1", port))
        found = path(seconds=0.4).reach(port)
    assert found["state"] == "filtered"
    assert found["ms"] >= 400


def test_accepted_and_then_silence_is_neither_open_nor_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "ANSWER_SECONDS", 0.3)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(4)
        assert path(seconds=0.2).reach(mute.getsockname()[1])["state"] == "silent"


def test_another_program_is_distinguished_from_a_listener() -> None:
    with socket.socket() as web:
        web.bind(("127.0.0.1", 0))
        web.listen(4)

        def answer() -> None:
            connection, _peer = web.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert path(seconds=2).reach(web.getsockname()[1])["state"] == "foreign"


def test_a_held_port_raises_and_is_not_fought_for(served: tuple[Any, int]) -> None:
    other = listening.Listener("x", "other", limit=1)
    with pytest.raises(OSError, match="in use"):
        other.open("127.0.0.1", served[1])


# -- round trips, packets, rates -----------------------------------------------------------------------------


def test_round_trip_packets_and_rates_of_an_open_port(served: tuple[Any, int]) -> None:
    port = served[1]
    took = path().round_trip(port)
    assert 0 < took["min"] <= took["median"] < 100
    mtu = int(Path("/sys/class/net/lo/mtu").read_text())
    found = path().path_mtu(port)
    assert not found["swallowed"]
    assert found["passes"] == found["sent"] <= mtu
    rates = path().stream(port, 0.1)
    assert rates["sent_mbit"] > 100
    assert rates["received_mbit"] > 100


def test_a_bounded_packet_has_the_size_it_is_bounded_to(served: tuple[Any, int]) -> None:
    for bound in (576, 1300, 1500):
        size, arrived, _after = path().packet_passes(served[1], bound)
        assert (size, arrived) == (bound, True)


def test_the_largest_packet_that_arrives_is_found(
    served: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-in for a path that swallows more than 1420 bytes: the lab has a real one."""
    real = probing.PeerPath.packet_passes

    def lossy(self: Any, port: int, packet: int = 0) -> tuple[int, bool, int]:
        size, arrived, after = real(self, port, packet)
        return size, arrived and size <= 1420, after

    monkeypatch.setattr(probing.PeerPath, "packet_passes", lossy)
    found = path().path_mtu(served[1])
    assert (found["swallowed"], found["passes"]) == (True, 1420)


def test_a_path_whose_smallest_packets_are_lost_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.PeerPath, "packet_passes", lambda *_: (576, False, 576))
    assert path().path_mtu(1) == {"sent": 576, "passes": 0, "swallowed": True}


def test_a_probe_returns_ports_round_trip_and_mtu(served: tuple[Any, int]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
        ports = [{"port": closed, "role": "store"}, {"port": served[1], "role": "gloo"}]
        found = probing.probe(path(), ports, ssh_port=22)
    assert [port["state"] for port in found["ports"]] == ["refused", "open"]
    assert [port["role"] for port in found["ports"]] == ["store", "gloo"]
    assert found["up"]
    assert found["rtt_ms"]["median"] > 0
    assert found["mtu"]["swallowed"] is False


def test_a_connection_that_breaks_off_is_reported(
    served: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "echo", lambda connection, asked: connection.close())
    found = probing.probe(path(), [{"port": served[1], "role": "gloo"}], ssh_port=22)
    assert found["ports"][0]["state"] == "open"
    assert found["cut"]


# -- the listener's end --------------------------------------------------------------------------------------

DETACHED = """
from ansible_collections.nanofleet.fleet.plugins.module_utils import peer_listener as n
listener = n.Listener("laptop", {token!r}, limit={limit}, idle={idle})
port = listener.open("127.0.0.1", 0)
print(port, n.detach(listener, {limit}), flush=True)
"""


def detached(token: str, limit: float, idle: float) -> tuple[int, int]:
    """(port, pid) of a listener in a process of its own, whose parent has ended."""
    code = DETACHED.format(token=token, limit=limit, idle=idle)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=with_collection(),
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    port, pid = done.stdout.split()
    return int(port), int(pid)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_for_end(pid: int, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    return not is_alive(pid)


def test_a_detached_listener_outlives_its_parent_and_ends_on_request() -> None:
    token = secrets.token_hex(16)
    port, pid = detached(token, limit=30, idle=30)
    try:
        assert path(token=token).reach(port)["state"] == "open"
        assert listening.stop(token)
        assert wait_for_end(pid, 5)
        assert not listening.stop(token), "nobody is left to be told"
        assert path(token=token).reach(port)["state"] == "refused"
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_forgotten_listener_ends_by_itself() -> None:
    port, pid = detached("b" * 32, limit=30, idle=0.5)
    assert wait_for_end(pid, 5)
    assert path().reach(port)["state"] == "refused"


# -- the host ------------------------------------------------------------------------------------------------


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    disk = host.disk_of(str(tmp_path / "opt" / "nanofleet"))
    assert os.path.ismount(disk["mount"])
    assert str(tmp_path).startswith(disk["mount"])
    status = os.statvfs(tmp_path)
    assert disk["free_gib"] == pytest.approx(status.f_bavail * status.f_frsize / 2**30, rel=0.2)
    assert disk["writable"]


def test_a_mark_changes_with_the_file_and_with_the_links_target(tmp_path: Path) -> None:
    assert host.mark(str(tmp_path / "none")) == ""
    file, link = tmp_path / "rules", tmp_path / "link"
    file.write_text("a")
    link.symlink_to(file)
    before, through = host.mark(str(file)), host.mark(str(link))
    assert before == host.mark(str(file))
    file.write_text("ab")
    assert host.mark(str(file)) != before
    other = tmp_path / "other"
    other.mkdir()
    link.unlink()
    link.symlink_to(other)
    assert host.mark(str(link)) != through


def test_memory_is_copied_at_a_plausible_rate() -> None:
    assert 0.1 < host.copy_rate(4, 1) < 1000


def test_links_have_addresses_and_a_kind() -> None:
    for name, link in host.links().items():
        assert name != "lo"
        assert isinstance(link["addresses"], list)
        assert isinstance(link["wireless"], bool)


# -- the rehearsal -------------------------------------------------------------------------------------------


def rehearse(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The last line of trainer.bench.rehearsal for each part, all of them at the same time."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.bench.rehearsal", json.dumps(part)],
            stdout=subprocess.PIPE, text=True, cwd=ROLE.parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for part in parts
    ]  # fmt: skip
    return [json.loads(process.communicate(timeout=90)[0].splitlines()[-1]) for process in running]


def rehearse_together(config: dict[str, Any]) -> list[dict[str, Any]]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    common = {
        "hosts": ["tower", "laptop"], "master": "127.0.0.1", "port": port, "rounds": [[[0, 1]]],
        "config": config,
    }  # fmt: skip
    return rehearse({**common, "rank": 0}, {**common, "rank": 1})


@pytest.mark.processes
def test_two_ranks_rehearse_an_all_reduce_and_multiply() -> None:
    tower, laptop = rehearse_together({"depth": 2, "sequence_len": 64, "total_batch_size": 128})
    for printed in (tower, laptop):
        assert printed["error"] == ""
        assert printed["allreduce_mbit"] > 1
        assert printed["pairs"] == {"0-1": printed["allreduce_mbit"]}
        assert printed["gemm_gflops"]["float32"] > 0.5
        assert printed["gemm_gflops"]["bfloat16"] > 0
    assert (tower["prediction_error"], laptop["predicted"]) == ("", None)
    predicted = tower["predicted"]
    assert (predicted["depth"], predicted["total_batch_size"], predicted["sync"]) == (2, 128, "dense")
    assert len(predicted["speeds"]) == 2
    assert 0 < predicted["modes"]["dense"]["network_s"] < predicted["modes"]["dense"]["step_s"]


@pytest.mark.processes
def test_settings_that_do_not_fit_the_hosts_leave_the_other_measurements() -> None:
    tower, laptop = rehearse_together({"sequence_len": 64, "total_batch_size": 64})
    assert "too few for 2 ranks" in tower["prediction_error"]
    assert tower["predicted"] is None
    assert tower["error"] == laptop["error"] == ""
    assert tower["allreduce_mbit"] > 1
