"""Signed membership messages: forged, repeated and foreign ones have no effect, and are reported once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.config import ConfigError
from trainer.distributed.consistency import Record
from trainer.elastic import signed
from trainer.elastic.agreement import Coordinator, Follower
from trainer.elastic.keys import Member, StoreKeys, View
from trainer.elastic.signed import SignedKeys, read_secret
from trainer.outcome import Final, Retryable

OURS, THEIRS = b"\x01" * 32, b"\x02" * 32


class Store:
    """A store in memory, and the warnings of the ranks that use it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.warnings: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values.get(key, "")

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def warn(self, key: str, text: str) -> None:
        self.warnings.append((key, text))

    def coordinator(self, secret: bytes = OURS) -> SignedKeys:
        return SignedKeys.announce(self, secret, "first", self.warn)

    def other(self, secret: bytes = OURS, run_id: str = "first", number: int = 1) -> SignedKeys:
        return SignedKeys.accept(self, secret, run_id, number, self.warn, 0.1)


@pytest.fixture
def store() -> Store:
    return Store()


def member(number: int, incarnation: int = 1) -> Member:
    return Member(number, incarnation, Record(number, f"host-{number}", "", {"code": "same"}, {}))


@pytest.mark.parametrize("value", ["1", "", "two words", "ä", '{"a": " b"}'])
def test_what_a_rank_writes_the_others_read(store: Store, value: str) -> None:
    coordinator, other = store.coordinator(), store.other()
    other.set("join/1", value)
    assert coordinator.get("join/1") == value
    assert coordinator.over(store).get("join/1") == value
    coordinator.set("committed", value)
    assert other.get("committed") == value
    assert other.get("ended") == ""
    assert (other.add("incarnation/1", 1), coordinator.add("incarnation/1", 1)) == (1, 2)
    assert store.warnings == []


@pytest.mark.parametrize(
    "forged",
    ["1", "0 0 1", "{nonce} 0 1", "{nonce} \ufffd 1", "{nonce} {signature} 2", "{nonce} {signature}", "   "],
)
def test_a_forged_value_is_not_set_and_is_reported_once(store: Store, forged: str) -> None:
    coordinator, other = store.coordinator(), store.other()
    other.set("leave/1", "1")
    nonce, signature, _ = store.values["leave/1"].split(" ")
    store.values["leave/1"] = forged.format(nonce=nonce, signature=signature)
    assert [coordinator.get("leave/1") for _ in range(3)] == ["", "", ""]
    [(key, text)] = store.warnings
    assert key == "leave/1"
    assert "leave/1 has no effect" in text
    assert "of rank 1 has another secret" in text
    assert text.endswith("ansible-playbook setup.yml")


def test_bytes_that_are_no_text_are_a_forged_value(store: Store) -> None:
    behind = dist.HashStore()
    keys = SignedKeys.announce(StoreKeys(behind), OURS, "first", store.warn)
    dist.PrefixStore("members", behind).set("join/1", b"\xff\xfe \x80 \xff")
    assert keys.get("join/1") == ""
    assert len(store.warnings) == 1


def test_a_message_counts_under_its_own_key_only(store: Store) -> None:
    coordinator, other = store.coordinator(), store.other()
    other.set("accepted/3/1", "1")
    for key in ("accepted/4/1", "accepted/3/2", "leave/1", "dropped/1"):
        store.values[key] = store.values["accepted/3/1"]
        assert coordinator.get(key) == "", key
    assert len(store.warnings) == 4
    assert coordinator.get("accepted/3/1") == "1"


def test_a_message_of_an_earlier_attempt_is_not_set(store: Store) -> None:
    store.coordinator()
    store.other().set("join/1", "1")
    kept = store.values["join/1"]
    later = store.coordinator()
    store.values["join/1"] = kept
    assert later.get("join/1") == ""
    [(_, text)] = store.warnings
    assert "was written for another attempt" in text


def test_a_message_of_an_earlier_incarnation_changes_nothing(store: Store) -> None:
    """It is signed and of this attempt, so the incarnation that it names is what refuses it."""
    keys, me = store.coordinator(), member(0)
    coordinator = Coordinator(keys, me, 2, 1)
    old, new = Follower(store.other(), member(1)), Follower(store.other(), member(1, 2))
    old.ask()
    kept = {"join/1": store.values["join/1"]}
    old.leave()
    kept["leave/1"] = store.values["leave/1"]
    coordinator.next_view(View(1, (me, member(1))), lambda each: True)
    new.ask()
    assert coordinator.applicants([me]) == [member(1, 2)]
    store.values["leave/1"] = kept["leave/1"]
    view = View(2, (me, member(1, 2)))
    assert coordinator.leavers(view) == []
    store.values["join/1"] = kept["join/1"]
    assert coordinator.replaced(view) == []
    assert coordinator.applicants([me]) == []
    assert store.warnings == []


@pytest.mark.parametrize("secret", [THEIRS, b""])
def test_a_host_with_another_secret_ends_and_is_named(store: Store, secret: bytes) -> None:
    coordinator = Coordinator(store.coordinator(), member(0), 3, 1)
    with pytest.raises(Final, match=r"the coordinator has another secret.*setup\.yml"):
        store.other(secret, number=2)
    assert coordinator.applicants([member(0)]) == []
    [(key, text)] = store.warnings
    assert key == "join/2"
    assert "The host of rank 2 has another secret" in text


def test_a_join_message_of_a_host_that_is_not_of_the_fleet_is_refused(store: Store) -> None:
    """It takes the nonce from the store and signs with a secret of its own, or not at all."""
    keys = store.coordinator()
    coordinator = Coordinator(keys, member(0), 2, 1)
    nonce = store.values["nonce"].split(" ")[0]
    Follower(SignedKeys(store, THEIRS, nonce, store.warn), member(1)).ask()
    assert coordinator.applicants([member(0)]) == []
    Follower(store, member(1)).ask()
    assert coordinator.applicants([member(0)]) == []
    Follower(store.other(), member(1)).ask()
    assert coordinator.applicants([member(0)]) == [member(1)]
    assert [key for key, _ in store.warnings] == ["join/1"]


@pytest.mark.parametrize("key", ["dropped/1", "refused/1", "ended", "committed", "proposal"])
def test_orders_that_the_coordinator_has_not_written_have_no_effect(store: Store, key: str) -> None:
    store.coordinator()
    follower = Follower(store.other(), member(1))
    store.values[key] = {
        "dropped/1": "1",
        "refused/1": '[1, "no"]',
        "ended": '["final", "no"]',
    }.get(key, View(1, (member(0), member(1))).dump())
    with pytest.raises(Retryable, match="did not confirm in time which ranks continue"):
        follower.follow(0, 0.1)
    assert [each for each, _ in store.warnings] == [key]
    assert "accepted/1/1" not in store.values


def test_a_rank_of_another_run_is_refused(store: Store) -> None:
    store.coordinator()
    with pytest.raises(Final, match="trains the run first, not second"):
        store.other(run_id="second")


def test_a_store_without_a_nonce_ends_the_attempt(store: Store) -> None:
    with pytest.raises(Retryable, match="has not written its first message to it within 0 s"):
        store.other()


def test_each_attempt_has_another_nonce(store: Store) -> None:
    nonces = set()
    for _ in range(3):
        store.coordinator()
        nonces.add(store.values["nonce"].split(" ")[0])
    assert {len(nonce) for nonce in nonces} == {32}
    assert len(nonces) == 3


def test_the_secret_is_read_from_the_file_that_the_unit_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(signed.VARIABLE, raising=False)
    assert read_secret() == b""
    path = tmp_path / "fleet.secret"
    monkeypatch.setenv(signed.VARIABLE, str(path))
    with pytest.raises(ConfigError, match=r"fleet\.secret, cannot be used: No such file.*setup\.yml"):
        read_secret()
    for text in ("", "not hexadecimal", "ab" * 31, "ä"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="it does not have 64 hexadecimal digits"):
            read_secret()
    path.write_text(OURS.hex() + "\n")
    assert read_secret() == OURS
