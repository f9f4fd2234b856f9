"""What preflight says where a host has too little for the run that is asked for."""

import json
from collections.abc import Mapping

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_run as run
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_memory import TRACKER_GIB, Need
from preflight_probe import GOOD, ROOT_OK, host, put, reported, severity


def test_a_run_that_fits_has_no_finding() -> None:
    assert host(config={}) == []
    assert host(config={"depth": "8"}) == []


def test_too_little_memory_is_refused_with_the_depth_that_fits() -> None:
    [found] = reported(put(GOOD, memory_kb="3000000", available_kb="2900000"), config={"depth": "8"})
    assert found["severity"] == "refusal"
    assert "Depth 8 needs about 5." in found["problem"]
    for part in ("the copy a checkpoint is written from 1.3", "the tracker 0.5", "torchrun 0.2"):
        assert part in found["problem"]
    assert "the host has 2.9 GiB." in found["problem"]
    depth = int(found["remedy"].rpartition("=")[2])
    assert found["remedy"] == f"repeat the command with -e depth={depth}"
    assert Need({"depth": depth}).memory_gb <= 2.9 < Need({"depth": depth + 1}).memory_gb


def test_too_little_free_memory_is_a_warning_that_names_the_biggest_process() -> None:
    busy = put(GOOD, available_kb="2097152")
    [found] = reported(busy, config={"depth": "8"})
    assert found["severity"] == "warning"
    assert "2.0 of the 15.3 GiB of this host are free. The largest program is firefox-esr" in found["problem"]
    # What a run that is up has taken is not somebody else's.
    assert host(busy + "active=nanofleet-d8.service\n", config={"depth": "8"}) == []


def test_memory_counts_every_rank_and_what_the_unit_may_use() -> None:
    assert Need({"depth": 8}, ranks=2).memory_gb > 1.6 * Need({"depth": 8}).memory_gb
    [(problem, _)] = host(put(GOOD, ranks="8"), config={"depth": "8"})
    assert problem.startswith("8 ranks with depth 8 need about ")
    [(problem, _)] = host(put(GOOD, limit="2G"), config={"depth": "8"})
    assert problem.endswith("; the setting fleet_memory allows 2.0 GiB.")
    assert run.limited_gb("50%", 16.0) == 8.0
    assert run.limited_gb("", 16.0) == 16.0


def test_a_host_with_less_memory_joins_with_a_micro_batch_of_its_own() -> None:
    small = put(GOOD, memory_kb="8000000", available_kb="7900000")
    config = {"depth": "8", "device_batch_size": "8"}
    [(problem, _)] = host(small, config=config)
    assert "a micro-batch of 8 x 1024 tokens" in problem
    assert host(put(small, micro_batch="1"), config=config) == []


def test_a_run_of_another_release_is_measured_by_what_is_known_of_it() -> None:
    stored = {"depth": 12, "flux": 3}
    assert (
        "Depth 12"
        in host(
            put(GOOD, memory_kb="3000000"), put(ROOT_OK, run_file=json.dumps({"config": stored})), config={}
        )[0][0]
    )
    stored["sync"] = "turbo"
    assert host(root=put(ROOT_OK, run_file=json.dumps({"config": stored})), config={"depth": 4}) == []


def test_hosts_that_may_become_the_coordinator_keep_copies_of_the_state() -> None:
    elastic = {"depth": 8, "sync": "exact", "elastic": "true"}
    plain = Need({**elastic, "elastic": "false"}, world_size=3, coordinates=False)
    first = Need(elastic, world_size=3)
    other = Need(elastic, world_size=3, coordinates=False)
    without = other.with_(coordinator_failover="false")
    assert first.memory_gb - TRACKER_GIB == pytest.approx(other.memory_gb)
    part = without.memory_gb - plain.memory_gb
    assert 0 < part < plain.checkpoint_gb / 3
    copies = sum(size for purpose, size in other.once.items() if "copies" in purpose or "tables" in purpose)
    assert 2 * plain.checkpoint_gb < copies < 3 * plain.checkpoint_gb
    assert other.memory_gb - plain.memory_gb == pytest.approx(plain.checkpoint_gb + copies + part)
    two = Need(elastic, world_size=6, coordinates=False, ranks=2)
    second = two.once["two copies of the state of its other ranks"]
    assert two.parts["optimizer"] < second < 2 * two.checkpoint_gb
    sizes = {"a": "99000000", "b": "4000000", "c": "99000000"}
    common = {"active": "", "disks": {}, "flags": "", "cores": 4}
    facts = {name: {**common, "memory_kb": size} for name, size in sizes.items()}
    found = run.run_findings(facts, {"asked": True, "config": elastic})
    [remedy] = [each["remedy"] for each in found if (each["code"], each["host"]) == ("NF401", "b")]
    assert "-e coordinator_failover=false" in remedy


def test_ranks_that_train_by_themselves_have_more_to_keep() -> None:
    """Beside its own weights each has those in common, their momentum and what rounding left over."""
    exact, local = (Need({"depth": 8, "sync": sync}, world_size=2) for sync in ("exact", "local"))
    weights = exact.parts["weights"]
    assert local.parts["outer parameters with momentum and error feedback"] == pytest.approx(3 * weights)
    assert local.parts["optimizer"] > exact.parts["optimizer"]
    assert local.checkpoint_gb == pytest.approx(exact.checkpoint_gb + weights)
    assert local.own_gb == pytest.approx(2 * weights)
    topk = Need({"depth": 8, "sync": "local", "local_topk": 352}, world_size=2)
    assert local.memory_gb - topk.memory_gb == pytest.approx(weights)
    assert topk.own_gb == pytest.approx(weights)
    small = put(GOOD, memory_kb="5000000")
    memory, disk = reported(small, config={"depth": "8", "sync": "local"})
    assert "outer parameters with momentum and error feedback 1.4" in memory["problem"]
    assert "4 checkpoints of 2.7 GiB each (the newest 2, " in disk["problem"]


def test_the_limit_of_a_container_is_the_memory_of_its_host() -> None:
    tight = put(GOOD, container_kb="3000000")
    assert "the host has 2.9 GiB" in host(tight, config={"depth": "8"})[0][0]
    for none in ("", "9007199254740988"):
        assert "refusal" not in severity(reported(put(GOOD, container_kb=none), config={"depth": "8"}))


def test_recomputed_layers_take_less_and_more_depth_fits() -> None:
    config = {"depth": "8", "sync": "exact"}
    kept, again = (Need({**config, "recompute": each}) for each in ("none", "layers"))
    micro_batch = "a micro-batch of 2 x 1024 tokens"
    assert again.parts[micro_batch] < kept.parts[micro_batch] / 2
    assert kept.memory_gb - again.memory_gb == pytest.approx(
        kept.parts[micro_batch] - again.parts[micro_batch]
    )
    between = put(GOOD, memory_kb=str(int((kept.memory_gb + again.memory_gb) / 2 * 2**20)))
    assert "Depth 8 needs about" in host(between, config=config)[0][0]
    assert "refusal" not in severity(reported(between, config={**config, "recompute": "layers"}))


def test_a_run_that_exists_is_measured_by_its_own_configuration() -> None:
    small = put(GOOD, memory_kb="3000000", available_kb="2900000", disk="/var/lib/nanofleet 90000000 /")
    stored = put(ROOT_OK, run_file=json.dumps({"config": {"depth": 4}}))
    assert host(small, stored, config={}) == []
    deep = put(ROOT_OK, run_file=json.dumps({"config": {"depth": 12}}))
    [(problem, remedy)] = host(small, deep, config={})
    assert problem.startswith("Depth 12 needs ")
    assert remedy == "make a host with more memory the coordinator in the inventory"  # its depth is settled
    deep = put(ROOT_OK, run_file=json.dumps({"config": {"depth": 4, "device_batch_size": 16}}))
    assert "write fleet_device_batch_size: " in host(small, deep, config={})[0][1]


def test_a_depth_that_the_other_settings_exclude_is_not_proposed() -> None:
    small = put(GOOD, memory_kb="3000000", available_kb="2900000")
    config = {"depth": "8", "aspect_ratio": "64", "head_dim": "64", "n_kv_head": "4"}
    [(problem, remedy), *_] = host(small, config=config)
    assert problem.startswith("Depth 8 needs ")
    assert remedy == "repeat the command with -e depth=4"


def test_room_for_the_checkpoints_of_the_depth() -> None:
    config = {"depth": "8"}  # 1.31 GiB each; keep_checkpoints is 2, so that 4 take 5.3
    four = put(GOOD, disk="/var/lib/nanofleet 4194304 /data")
    [found] = reported(four, config=config)
    assert found["severity"] == "warning"
    assert (
        "/var/lib/nanofleet has 4.0 GiB free for checkpoints, and a run of depth 8 needs 5.2 GiB"
        in found["problem"]
    )
    assert found["remedy"].endswith("-e keep_checkpoints=1")
    assert host(four, put(ROOT_OK, kept_kb="2097152"), config=config) == []
    [found] = reported(four, config={**config, "keep_checkpoints": "6"})
    assert found["remedy"].endswith("-e keep_checkpoints=1"), "five of them would not fit either"
    two = put(GOOD, disk="/var/lib/nanofleet 2500000 /data") + "installed=yes\n"
    assert severity(reported(two, config=config)) == ["refusal"]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("avx avx2", True),
        ("avx avx2 avx512f", True),
        ("avx avx2 avx512_bf16", False),
        ("avx2 amx_bf16", False),
    ],
)
def test_bfloat16_where_it_is_emulated(flags: str, refused: bool) -> None:
    found = reported(put(GOOD, flags=flags), config={"dtype": "bfloat16"})
    assert severity(found) == (["refusal"] if refused else [])
    stored = put(ROOT_OK, run_file=json.dumps({"config": {"dtype": "bfloat16"}}))
    assert not refused or "start a new run" in host(put(GOOD, flags=flags), stored, config={})[0][1]
    assert not refused or f"its vector instructions are {', '.join(flags.split())}" in found[0]["problem"]
    assert host(put(GOOD, flags=flags), config={"dtype": "auto"}) == []
    on_gpu = {"config": {"dtype": "bfloat16"}, "variables": {"runtime_torch": "cuda"}}
    assert host(put(GOOD, flags=flags, gpu="yes"), **on_gpu) == []
    assert bool(host(put(GOOD, flags=flags, gpu="yes"), config={"dtype": "bfloat16"})) == refused


@pytest.mark.parametrize(
    ("cpus", "refused"),
    [("0-3", False), ("1,3", False), ("2-5", True), ("0,7-9,8", True), ("3-1", True)],
)
def test_processors_that_a_host_lacks_are_refused(cpus: str, refused: bool) -> None:
    found = reported(put(GOOD, cpus=cpus), config={})
    assert severity(found) == (["refusal"] if refused else [])
    if refused:
        problem = f"fleet_cpus of this host is {cpus}, but the host has only the processors 0-3."
        assert found[0]["problem"] == problem
        assert found[0]["remedy"] == (
            "write fleet_cpus: 0-3, or a part of these processors, at laptop in the inventory; or remove "
            "fleet_cpus (from the inventory, or -e fleet_cpus) to use all"
        )


@pytest.mark.parametrize(
    ("probe", "config", "ranks", "problem", "remedy"),
    [
        ({"threads": "4"}, {}, 1, "", ""),
        ({"threads": "0"}, {"threads": "auto"}, 1, "", ""),
        ({"threads": "16"}, {}, 1, "fleet_threads is 16, but the host has 4 ", "remove fleet_threads"),
        ({"threads": "2", "cpus": "3"}, {}, 1, "fleet_threads is 2, but fleet_cpus allows 1 ", "remove"),
        ({}, {"threads": 6}, 1, "threads is 6, but the host has 4 ", "threads=auto  (or -e threads=4)"),
        ({}, {"threads": 3}, 2, "threads times 2 ranks is 6, but the host has 4 ", "(or -e threads=2)"),
        ({"threads": "16", "online": ""}, {}, 1, "", ""),  # not known
    ],
)  # fmt: skip
def test_more_threads_than_processors_are_a_warning(
    probe: dict[str, str], config: dict[str, object], ranks: int, problem: str, remedy: str
) -> None:
    found = reported(put(GOOD, ranks=str(ranks), **probe), config=config)
    assert severity(found) == (["warning"] if problem else [])
    if problem:
        assert found[0]["problem"].startswith(problem)
        assert remedy in found[0]["remedy"]


def test_a_processor_without_avx2_is_slow() -> None:
    [found] = reported(put(GOOD, flags="avx"), config={})
    assert found["severity"] == "warning"
    assert "no AVX2" in found["problem"]
    assert host(put(GOOD, flags="asimd", machine="aarch64"), config={}) == []


def settings(
    sizes: dict[str, str], ranks: Mapping[str, str] | None = None, **config: object
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """(settings that follow from hosts with memory of these sizes in kB, their findings)."""
    ranks = ranks or {}
    common = {"active": "", "disks": {}, "flags": "", "cores": 4}
    facts = {
        name: {**common, "memory_kb": size, "ranks": ranks.get(name, "1")} for name, size in sizes.items()
    }
    options = {"asked": True, "config": {"depth": 8, **config}}
    return run.run_settings(facts, options), run.run_findings(facts, options)


def test_a_run_of_several_hosts_is_elastic_where_its_copies_fit() -> None:
    large = dict.fromkeys(("a", "b", "c"), "99000000")
    assert settings(large) == ({"elastic": "true"}, [])
    assert settings(large, elastic="false") == ({}, [])
    assert settings({"a": "99000000"}) == ({}, [])
    assert settings(large, device="cuda") == ({"elastic": "false"}, [])
    assert settings(large, dict.fromkeys(large, "2")) == ({"elastic": "true"}, [])
    assert settings(large, {"b": "2"}) == ({"elastic": "false"}, []), "its hosts have as many ranks each"
    # Of two hosts only the coordinator keeps whole copies, of three each does.
    small = "6000000"
    assert settings({"a": "99000000", "b": small})[0] == {"elastic": "true"}
    decided, [found] = settings({"a": "99000000", "b": "99000000", "c": small})
    assert decided == {"elastic": "false"}
    assert (found["code"], found["host"], found["severity"]) == ("NF445", "c", "warning")
    assert "-e elastic=true -e coordinator_failover=false" in found["remedy"]
    assert "lacks 1.9 GiB" in found["problem"]
    # With local each host continues from its own parameters, and keeps no copies.
    alone = Need({"depth": 8, "sync": "local", "elastic": "false"}, world_size=3).memory_gb
    three = {"a": "99000000", "b": "99000000", "c": str(int(alone * 2**20) + 1)}
    assert settings(three, sync="local") == ({"elastic": "true"}, [])
    decided, [found] = settings({"a": small, "b": "99000000"})
    assert decided == {"elastic": "false"}
    assert found["remedy"].endswith("a smaller -e depth and -e run_id=NAME")


def test_a_host_too_small_for_the_run_itself_is_refused_without_a_word_on_elastic() -> None:
    decided, found = settings({"a": "99000000", "b": "2000000"})
    assert decided == {"elastic": "false"}
    assert [each["code"] for each in found] == ["NF401"]
    # The depth that fits is that of the run without copies.
    _, [plain] = settings({"a": "4500000", "b": "99000000"}, elastic="false")
    _, [auto] = settings({"a": "4500000", "b": "99000000"})
    assert auto == plain


def test_a_run_that_exists_and_is_elastic_is_offered_to_be_so_no_longer() -> None:
    """Its depth is settled, and another coordinator may have less memory than the first."""
    large = {"memory_kb": "99000000", "active": "", "disks": {}, "flags": "", "cores": 4}
    stored = json.dumps({"config": {"depth": 8, "elastic": "true"}})
    facts = {"a": {**large, "memory_kb": "6500000"}, "b": {**large, "run_file": stored}}
    [found] = run.run_findings(facts, {"asked": True, "config": {}})
    assert found["code"] == "NF401"
    assert "-e elastic=false" in found["remedy"]


def test_a_run_keeps_what_was_decided_at_its_start() -> None:
    large = {"memory_kb": "99000000", "active": "", "disks": {}, "flags": "", "cores": 4}
    stored = json.dumps({"config": {"depth": 8, "elastic": "false"}})
    facts = {"a": {**large, "run_file": stored}, "b": large}
    options = {"asked": True, "config": {}}
    assert run.run_settings(facts, options) == {}
    again = {**options, "config": {"elastic": "auto"}}
    assert run.run_settings(facts, again) == {"elastic": "true"}


def joining(small: str, **config: str) -> list[dict[str, str]]:
    """The findings where b, with `small` kB of memory, joins a run that trains on a."""
    large = {"memory_kb": "99000000", "active": [], "disks": {}, "flags": "", "cores": 4}
    stored = json.dumps({"config": {"depth": 8, "elastic": "true", **config}, "hosts": ["a"]})
    facts = {
        "a": {**large, "run_file": stored, "memory_kb": "2000000", "active": ["nanofleet-d8.service"]},
        "b": {**large, "memory_kb": small},
    }
    return run.run_findings(facts, {"asked": True, "config": {}})


def test_a_host_that_is_too_small_to_join_is_refused_and_the_others_are_not_checked_again() -> None:
    assert joining("6000000") == []
    [found] = joining("1000000")
    assert (found["code"], found["host"]) == ("NF401", "b")
    assert found["remedy"] == "remove b from the inventory"
    [found] = joining("6000000", device_batch_size="16")
    assert "write fleet_device_batch_size: 5 at b in the inventory" in found["remedy"]


@pytest.mark.parametrize("run_file", ["null", "{", '{"config": "damaged"}'])
def test_a_damaged_run_file_is_left_out(run_file: str) -> None:
    large = {"memory_kb": "99000000", "active": [], "disks": {}, "flags": "", "cores": 4}
    options = {"asked": True, "config": {}}
    assert run.run_findings({"a": {**large, "run_file": run_file}}, options) == []


def test_a_host_that_is_added_may_not_become_the_coordinator_and_keeps_no_copies() -> None:
    keeps = Need({"depth": 8, "elastic": "true", "coordinator_failover": "true"}, world_size=2)
    assert joining(str(int(keeps.memory_gb * 2**20) - 100_000), coordinator_failover="true") == []
