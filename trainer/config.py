"""The settings of a run in one frozen dataclass, with casts, checks, digest and default name.

Each setting belongs to one of three sections. The settings of `identity` define the training: they make up
the run's digest and cannot change once the run has begun. Those of `horizon` set the number of steps and may
change when the run is resumed. Those of `runtime` may change at every start: they change the trained
parameters by rounding at most. With sync=local, those for elastic runs also decide which ranks contribute.

Run files and checkpoints store all settings and SCHEMA. A release that adds, removes or changes a setting of
`identity` increases SCHEMA, so that an older release refuses a run that it would train differently; `migrate`
converts the files of older releases.

Only the standard library is imported, so that a controller without torch can check and name a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 5  # of run files and of meta.json in checkpoints
IDENTITY, HORIZON, RUNTIME = "identity", "horizon", "runtime"
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MUTABLE = (HORIZON, RUNTIME)  # what may change when a run is resumed
EXPERIMENT_PATTERN = re.compile(r"(?=.{1,250}\Z)(?! )([\w.:/ -]|\{depth\})+(?<! )")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float64")
SYNC_MODES = ("dense", "exact", "fast", "local")
LOCAL_BITS = (2, 4, 8, 32)
LOCAL_TOPK = 2048  # with more values, sending their positions costs more than leaving out the rest saves
EXACT_MODES = ("dense", "exact")  # equal sums, in the number format of the run
NEAR_MODES = ("fast",)  # other rounding; local is another algorithm
BY_SPEED = "auto"
TRACKERS = ("mlflow", "none")
AUTO_IS_0 = ("total_batch_size", "threads", "snapshot_seconds")  # settings that take auto for 0
RECOMPUTE = ("none", "layers")
SWITCHES = ("auto", "true", "false")  # values of elastic and coordinator_failover


class ConfigError(ValueError):
    """Raised for an invalid setting, option or run file. The message is a sentence for the user."""


class NewerSchemaError(ConfigError):
    """Raised for a run file or checkpoint whose schema is newer than SCHEMA of this release."""


def setting(default: Any, help: str, section: str = IDENTITY, **more: Any) -> Any:
    """A field of RunConfig.

    default: its default value. help: its text in `python -m trainer train --help`. section: identity, horizon
    or runtime (see the top of this file). more: further metadata of the field. Its key `before` is the value
    for runs that a release without this setting has started; without the key, these runs have the default.
    """
    return field(default=default, metadata={"help": help, "section": section, **more})


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, one field each. The help text of a field has its meaning and unit.

    The constructor raises ConfigError for invalid values; `from_strings` casts text.
    """

    depth: int = setting(8, "transformer layers; width, heads and rates follow from it")
    aspect_ratio: int = setting(64, "width per layer; depth * aspect_ratio is rounded up to whole heads")
    head_dim: int = setting(128, "width of one attention head, even")
    n_kv_head: int = setting(0, "key/value heads, a divisor of the number of heads; 0: as many as heads")
    sequence_len: int = setting(1024, "tokens of context, T")
    window_pattern: str = setting("SSSL", "attention windows tiled over the layers: S short, L whole context")
    device_batch_size: int = setting(2, "sequences of a micro-batch: more is faster, takes memory", RUNTIME)
    recompute: str = setting("none", "layers: backward computes each layer again, for less memory", RUNTIME)
    total_batch_size: int = setting(4096, "tokens of a step over all ranks; 0 or auto: by the model's size")
    num_iterations: int = setting(
        5000,
        "steps of the run; 0: from target_flops, else target_param_data_ratio; with stage sft 0: one epoch",
        HORIZON,
    )
    target_flops: float = setting(0.0, "floating-point operations of the whole run; 0: not set", HORIZON)
    target_param_data_ratio: float = setting(
        12.0, "tokens per scaling parameter, if neither num_iterations nor target_flops is set", HORIZON
    )
    unembedding_lr: float = setting(0.008, "AdamW rate of lm_head")
    embedding_lr: float = setting(0.3, "AdamW rate of wte; value embeddings take half of it")
    matrix_lr: float = setting(0.02, "Muon rate of the matrices in the transformer layers")
    scalar_lr: float = setting(0.5, "AdamW rate of the per-layer scalars")
    weight_decay: float = setting(0.28, "cautious weight decay of Muon, before scaling; with stage sft 0")
    init_lr_frac: float = setting(1.0, "factor of all rates; with stage sft 0.8")
    warmup_steps: int = setting(40, "steps of linear warm-up; with stage sft 0")
    warmdown_ratio: float = setting(0.65, "fraction of the run over which rates fall; with stage sft 0.5")
    final_lr_frac: float = setting(0.05, "fraction of the rates at the end; with stage sft 0")
    stage: str = setting("base", "base, or sft: train the model of a checkpoint further on conversations")
    parent: str = setting("", "with stage sft, RUN_ID/step_NNNNNN/SHA256 of the checkpoint it begins with")
    eval_every: int = setting(250, "steps between evaluations; 0: only at the end", RUNTIME)
    eval_tokens: int = setting(65536, "validation tokens of an evaluation over all ranks", RUNTIME)
    core_metric_every: int = setting(0, "steps between evaluations of CORE; 0: never", RUNTIME)
    core_metric_max_per_task: int = setting(500, "items of each CORE task at most; 0: all", RUNTIME)
    sample_every: int = setting(0, "steps between samples of text; 0: only at the end", RUNTIME)
    save_every: int = setting(0, "steps between checkpoints; 0: by save_minutes only", RUNTIME)
    save_minutes: float = setting(
        30.0, "minutes between checkpoints; 0: by save_every only, and at the end", RUNTIME
    )
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep, besides the best one", RUNTIME)
    checkpoint_copies: int = setting(
        2,
        "hosts that keep each checkpoint: the coordinator and the next ones; 1: only the coordinator",
        RUNTIME,
    )
    seed: int = setting(42, "seed of the weights and of the order of the rows")
    device: str = setting(
        "auto",
        f"where the ranks compute: {' or '.join(DEVICES)} (auto: cuda if every rank has a GPU)",
        RUNTIME,
    )
    dtype: str = setting(
        "auto",
        f"number format of GEMMs: {' or '.join(DTYPES)} (auto: float32 or bfloat16, the faster on each host)",
    )
    threads: int = setting(0, "threads of a rank; 0 or auto: OMP_NUM_THREADS, else measured", RUNTIME)
    sync: str = setting(
        "dense",
        f"sync mode: {' or '.join(SYNC_MODES)}; auto: the faster by prediction of "
        f"{' and '.join(EXACT_MODES)}, which compute the same (local: each rank steps on its own rows of "
        "total_batch_size, and ranks synchronize every local_steps)",
    )
    sync_allow: str = setting(
        "", f"modes with other rounding that sync=auto may use too: {', '.join(NEAR_MODES)}"
    )
    local_steps: int = setting(30, "with sync local, steps between two sync rounds of the same parameters")
    local_lr: float = setting(0.7, "with sync local, learning rate of the outer step")
    local_momentum: float = setting(0.6, "with sync local, Nesterov momentum of the outer step, below 1")
    local_bits: int = setting(8, "with sync local, bits of a sent value: 8, 4, 2, or 32 for no rounding")
    local_topk: int = setting(0, "with sync local, values sent of each 4,096, the largest; 0: all")
    local_delay: int = setting(1, "with sync local, steps that overlap with a sync round, below local_steps")
    local_grace: float = setting(
        60.0,
        "with sync local and elastic, seconds that the others wait for a rank that still computes a step; "
        "then they continue without it",
        RUNTIME,
    )
    join_grace: float = setting(
        60.0,
        "with elastic, the longest pause of the others for a rank that joins, in seconds; then they continue "
        "without it, and it may join again after 20 times that pause",
        RUNTIME,
    )
    elastic: str = setting(
        "auto",
        "whether hosts may leave and join while the run trains; auto: train.yml decides, true with two or "
        "more hosts without GPU that have memory for copies of the state",
        RUNTIME,
        before="false",
    )
    min_hosts: int = setting(1, "with elastic, the least number of hosts; with fewer the run waits", RUNTIME)
    coordinator_failover: str = setting(
        "auto",
        "with elastic, whether the hosts elect another coordinator when theirs is lost; auto: with three or "
        "more hosts; true: also with two, of which the remaining one continues alone",
        RUNTIME,
    )
    snapshot_seconds: float = setting(
        0.0,
        "with elastic, seconds between copies of the state; 0 or auto: 2 to 60 by their cost, longer if a "
        "copy takes more than 20 s to arrive",
        RUNTIME,
    )
    tracker: str = setting("mlflow", f"tracker besides metrics.jsonl: {' or '.join(TRACKERS)}", RUNTIME)
    tracker_experiment: str = setting(
        "nanochat-d{depth}",
        "MLflow experiment of the run; {depth} stands for the depth",
        RUNTIME,
        before="nanofleet",
    )
    digest_every: int = setting(
        50, "steps between comparisons of the parameters across ranks; 0: never", RUNTIME
    )

    def __post_init__(self) -> None:
        for holds, what, names in _RULES:
            for name in names.split():
                self._require(name, bool(holds(getattr(self, name))), what)
        if self.sync == "local":
            self._require(
                "local_delay",
                0 <= self.local_delay < self.local_steps,
                f"must be at least 0 and below local_steps ({self.local_steps}); "
                f"use {min(1, self.local_steps - 1)}",
            )
        if self.num_iterations and self.target_flops:
            raise ConfigError(
                f"num_iterations is {self.num_iterations} and target_flops is {self.target_flops:g}, but "
                "only one of them can set the length of the run. Leave one of them out."
            )
        self._require("head_dim", self.head_dim % 2 == 0, "must be even: rotary positions work on pairs")
        self._require(
            "head_dim",
            self.n_embd >= 24,
            f"makes the model {self.n_embd} wide, less than 24: raise depth, aspect_ratio or head_dim",
        )
        self._require(
            "n_kv_head",
            self.n_kv_head == 0 or self.n_head % self.n_kv_head == 0,
            f"must divide the number of heads, {self.n_head} here",
        )
        if rest := self.total_batch_size % self.sequence_len:
            below = self.total_batch_size - rest
            near = [str(size) for size in (below, below + self.sequence_len) if size]
            raise ConfigError(
                f"total_batch_size is {self.total_batch_size}: it must be a multiple of sequence_len "
                f"({self.sequence_len}); use {' or '.join(near)}."
            )

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)!r}: it {what}.")

    @property
    def auto_modes(self) -> list[str]:
        """The sync modes among which sync=auto chooses."""
        return [*EXACT_MODES, *filter(None, self.sync_allow.split(","))]

    @property
    def n_embd(self) -> int:
        """Width D of the model: depth * aspect_ratio, rounded up to a multiple of head_dim."""
        return math.ceil(self.depth * self.aspect_ratio / self.head_dim) * self.head_dim

    @property
    def n_head(self) -> int:
        """The number of attention heads."""
        return self.n_embd // self.head_dim

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may leave and join while the run trains; False while the setting is still auto."""
        return self.elastic == "true"

    def has_failover(self, hosts: int) -> bool:
        """Whether another host becomes the coordinator of the run when the coordinator is lost.

        hosts: number of hosts of the run.
        """
        possible = self.is_elastic and hosts > 1
        return possible and (
            self.coordinator_failover == "true" or (self.coordinator_failover == "auto" and hosts > 2)
        )

    def quorum(self, hosts: int) -> int:
        """The least number of hosts that train a run with coordinator_failover.

        hosts: number of hosts of the run. The result is a majority of the hosts, or 1 with two hosts; it is
        min_hosts if min_hosts is more.
        """
        return max(self.min_hosts, hosts // 2 + 1 if hosts > 2 else 1)

    @property
    def experiment(self) -> str:
        """The name of the MLflow experiment."""
        return self.tracker_experiment.replace("{depth}", str(self.depth))

    def digest(self) -> str:
        """SHA-256 (hex) of the settings in section `identity`; those of other sections do not change it."""
        settings = {name: getattr(self, name) for name in self.field_names(IDENTITY)}
        return hashlib.sha256(canonical_json(settings)).hexdigest()

    def default_run_id(self) -> str:
        """The name of a run if none is given, such as "d8-1a2b3c4d": depth, and start of `digest`."""
        return f"d{self.depth}-{self.digest()[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict: {name: value}."""
        return dataclasses.asdict(self)

    def differences(self, before: RunConfig, *sections: str) -> list[str]:
        """The settings that differ from those of `before`, as texts: ["seed was 42, now 43"].

        sections: only settings of these sections are compared.
        """
        names = [name for section in sections for name in self.field_names(section)]
        values = {name: (getattr(before, name), getattr(self, name)) for name in names}
        return [f"{name} was {old!r}, now {new!r}" for name, (old, new) in values.items() if old != new]

    @classmethod
    def field_names(cls, section: str = "") -> tuple[str, ...]:
        """The names of all settings, or of the settings in `section`."""
        return tuple(f.name for f in dataclasses.fields(cls) if section in ("", f.metadata["section"]))

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> RunConfig:
        """The configuration of a resumed run: its saved settings, replaced by those in `given`.

        saved, given: {setting: value}. If `saved` is empty, the run is a new one. If `given` has a setting of
        section `horizon`, all saved settings of this section are dropped. Raises ConfigError for an unknown
        setting in `given`, or for an invalid value.
        """
        values = migrate(cls, saved)[0] if saved else {}
        if given.keys() & cls.field_names(HORIZON):
            values = {name: value for name, value in values.items() if name not in cls.field_names(HORIZON)}
        return cls.from_strings({**values, **given})

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
        """Build the configuration from the settings in a run file or checkpoint.

        saved: these settings, {setting: value}. Returns (the configuration, the names in `saved` that are no
        settings of this release). Raises ConfigError for an invalid value.
        """
        values, unknown = migrate(cls, saved)
        return cls.from_strings(values), unknown

    @classmethod
    def from_strings(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration with `values`, which are cast and checked; other settings have their defaults.

        values: {setting: text or number}, from a command line, YAML or JSON. If they have target_flops or
        target_param_data_ratio but not num_iterations, num_iterations becomes 0. Raises ConfigError for an
        unknown name, a value of the wrong type, a value out of range or values that contradict each other.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        cast: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), list(known), n=1)
                hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}."
                raise ConfigError(f"{name} is not a setting of a run: {hint}")
            cast[name] = _cast(name, str(known[name].type), value)
        if "num_iterations" not in cast and ("target_flops" in cast or "target_param_data_ratio" in cast):
            cast["num_iterations"] = 0  # a given horizon replaces the default one
        return cls(**cast)


_KINDS = {"int": "a whole number", "float": "a number", "str": "a string"}
BOOLS = {"true": "true", "yes": "true", "false": "false", "no": "false"}
# Conditions of single settings: (whether it holds for the value, its text in the message, the settings).
_RULES: tuple[tuple[Callable[[Any], object], str, str], ...] = (
    (lambda v: v >= 1, "must be at least 1", "depth aspect_ratio head_dim sequence_len device_batch_size"),
    (lambda v: v >= 1, "must be at least 1", "eval_tokens keep_checkpoints local_steps min_hosts"),
    (lambda v: v >= 1, "must be at least 1", "checkpoint_copies"),
    (lambda v: v >= 0, "must not be negative", "n_kv_head total_batch_size num_iterations target_flops"),
    (lambda v: v >= 0, "must not be negative", "warmup_steps eval_every sample_every save_every"),
    (lambda v: v >= 0, "must not be negative", "save_minutes digest_every seed threads weight_decay"),
    (lambda v: v >= 0, "must not be negative", "core_metric_every core_metric_max_per_task snapshot_seconds"),
    (lambda v: v > 0, "must be above 0", "unembedding_lr embedding_lr matrix_lr scalar_lr local_lr"),
    (lambda v: v > 0, "must be above 0", "target_param_data_ratio init_lr_frac local_grace join_grace"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "warmdown_ratio final_lr_frac"),
    (lambda v: 0 <= v < 1, "must be at least 0 and below 1", "local_momentum"),
    (lambda v: v < 2**63, "must be below 2^63", "seed"),
    (lambda v: v in LOCAL_BITS, "must be 2, 4, 8 or 32", "local_bits"),
    (lambda v: 0 <= v <= LOCAL_TOPK, f"must lie between 0 and {LOCAL_TOPK:,}", "local_topk"),
    (lambda v: v in DEVICES, f"must be {' or '.join(DEVICES)}", "device"),
    (lambda v: v in DTYPES, f"must be {' or '.join(DTYPES)}", "dtype"),
    (lambda v: v in (*SYNC_MODES, "auto"), f"must be {' or '.join((*SYNC_MODES, 'auto'))}", "sync"),
    (lambda v: v in ("base", "sft"), "must be base or sft", "stage"),
    (lambda v: v in SWITCHES, "must be auto, true or false", "elastic coordinator_failover"),
    (lambda v: v in RECOMPUTE, f"must be {' or '.join(RECOMPUTE)}", "recompute"),
    (lambda v: v in TRACKERS, f"must be {' or '.join(TRACKERS)}", "tracker"),
    (
        lambda v: not v or set(v.split(",")) <= set(NEAR_MODES),
        f"takes {', '.join(NEAR_MODES)}, or nothing",
        "sync_allow",
    ),
    (re.compile("[SL]+").fullmatch, "must consist of the letters S and L, such as SSSL", "window_pattern"),
    (
        EXPERIMENT_PATTERN.fullmatch,
        "takes 1 to 250 letters, digits, blanks inside, and . _ - : /, and {depth} for the depth",
        "tracker_experiment",
    ),
)


def _cast(name: str, kind: str, value: Any) -> Any:
    text = str(value).strip()
    if name in ("elastic", "coordinator_failover") and text.lower() in BOOLS:  # as YAML has it
        return BOOLS[text.lower()]
    if kind == "str" and value is not None and not isinstance(value, bool):
        return text
    if name in AUTO_IS_0 and text.lower() == "auto":
        return 0
    with contextlib.suppress(ValueError):
        if not isinstance(value, bool) and kind == "float" and math.isfinite(number := float(text)):
            return number
        if not isinstance(value, bool) and kind == "int":
            return int(text.replace("_", ""))
    takes = _KINDS[kind] + (" or auto" if name in AUTO_IS_0 else "")
    raise ConfigError(f"{name} is {text!r}: it takes {takes}.")


def canonical_json(value: Any) -> bytes:
    """`value` as JSON with sorted keys and no blanks, in ASCII. Digests are computed from these bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def check_schema(schema: Any, what: str) -> None:
    """Raise ConfigError unless `schema` is an integer from 1 to SCHEMA. what: the file, for the message."""
    if type(schema) is not int or schema < 1:
        raise ConfigError(
            f"{what} has {schema!r} as its schema (format version), which must be a whole number from 1. The "
            "file is damaged or was not written by nanofleet: restore it from a copy, or delete it and "
            "repeat the command."
        )
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"{what} was written by a newer nanofleet (schema {schema}; this one reads up to {SCHEMA}). "
            "Update nanofleet on the controller, then: ansible-playbook setup.yml; by hand update it on "
            "this host."
        )


def migrate(cls: type[Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Adapt saved values, which may be those of an older release, to the fields of the dataclass `cls`.

    saved: {name: value}. Returns ({field: value}, saved names that are no fields). A field that was not saved
    gets the value in its metadata `before`, which is valid for runs older than the field. Without `before`
    the field is left out, so that its default applies.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {name: f.metadata["before"] for name, f in fields.items() if "before" in f.metadata}
    values |= {name: value for name, value in saved.items() if name in fields}
    return values, [name for name in saved if name not in fields]


def note_of_dropped(unknown: Sequence[str], saved: Mapping[str, Any], what: str) -> str:
    """The warning that lists the settings of a file that this release no longer has, with their values.

    unknown: names of these settings. saved: all settings of the file, {setting: value}. what: text for the
    file, such as "The run file PATH".
    """
    listed = ", ".join(f"{name} ({saved[name]!r})" for name in unknown)
    return f"{what} has settings that this release no longer has; they are ignored: {listed}."


@dataclass(frozen=True)
class RunFile:
    """The content of run.json, the same on every host of a run.

    On a host that was added to an active run the file also has added_hosts, which only train.yml reads.
    run_id: name of the run. config: its settings.
    hosts: names of the hosts, in rank order; empty if the run was started without the playbooks.
    trainer_digest: digest of the trainer's code; "" if any version may train the run.
    manifest_sha256: sha256 of the data's manifest; "" if any data may be used.
    shares: rows per rank; () for an equal split, "auto" for a split by speed.
    chosen_from: the hosts from which sync=auto has chosen the single host in `hosts`; empty if sync=auto has
        not chosen a host.
    """

    run_id: str
    config: RunConfig
    hosts: tuple[str, ...] = ()
    trainer_digest: str = ""
    manifest_sha256: str = ""
    shares: tuple[int, ...] | str = ()
    chosen_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(share < 1 for share in self.fixed_shares):
            raise ConfigError(f"shares is {self.shown_shares}: each rank takes 1 row of a step or more.")
        if not RUN_ID_PATTERN.fullmatch(self.run_id):
            raise ConfigError(
                f"run_id is {self.run_id!r}: it takes 1 to 63 letters, digits, dots, dashes and underscores, "
                "and starts with a letter or digit."
            )

    @property
    def by_speed(self) -> bool:
        """Whether `shares` is auto: the rows of a step are split by the measured speed of the ranks."""
        return self.shares == BY_SPEED

    @property
    def fixed_shares(self) -> tuple[int, ...]:
        """The rows per rank that are set by hand; empty if `shares` is equal or auto."""
        return () if isinstance(self.shares, str) else self.shares

    @property
    def shown_shares(self) -> str:
        """`shares` as text: equal, auto, or numbers with commas."""
        return BY_SPEED if self.by_speed else ",".join(map(str, self.shares)) or "equal"

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """Read and check run.json at `path`.

        Settings that this release no longer has are listed on stderr. Raises ConfigError, with the path in
        the message, if the file cannot be read or its content is invalid.
        """

        def unusable(problem: str) -> ConfigError:
            return ConfigError(
                f"The run file {path} {problem}. Start the run with train.yml, which writes it."
            )

        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"The run file {path} cannot be read: {error.strerror}. Check its path and permissions."
            ) from None
        except ValueError as error:
            raise unusable(f"is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise unusable("holds no settings")
        check_schema(raw.get("schema"), f"The run file {path}")
        if not isinstance(raw.get("config"), dict) or not isinstance(raw.get("hosts", []), list):
            raise unusable("lacks its config or hosts")
        try:
            config, unknown = RunConfig.load(raw["config"])
            if unknown:
                note = note_of_dropped(unknown, raw["config"], f"The run file {path}")
                print(note, file=sys.stderr, flush=True)
            return cls(
                run_id=str(raw.get("run_id", "")),
                config=config,
                hosts=tuple(map(str, raw.get("hosts", []))),
                shares=parse_shares(raw.get("shares", [])),
                trainer_digest=str(raw.get("trainer_digest", "")),
                manifest_sha256=str(raw.get("manifest_sha256", "")),
                chosen_from=tuple(map(str, raw.get("chosen_from", []))),
            )
        except ConfigError as error:
            raise ConfigError(f"In the run file {path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The content of run.json: schema, and the fields by name."""
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "config": self.config.to_dict(),
            "hosts": list(self.hosts),
            "chosen_from": list(self.chosen_from),
            "shares": BY_SPEED if self.by_speed else list(self.fixed_shares),
            "trainer_digest": self.trainer_digest,
            "manifest_sha256": self.manifest_sha256,
        }

    def digest(self) -> str:
        """The sha256 (hex) of `to_dict()` as canonical JSON; it is not the sha256 of the file run.json."""
        return hashlib.sha256(canonical_json(self.to_dict())).hexdigest()


def parse_shares(value: Any) -> tuple[int, ...] | str:
    """Parse rows per rank: "3,2" or [3, 2] -> (3, 2); "equal", "" or [] -> (); "auto" -> "auto".

    Raises ConfigError if a part is not a whole number. RunFile refuses numbers below 1.
    """
    if value == BY_SPEED:
        return BY_SPEED
    if value == "equal":
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(int(str(part)) for part in parts if str(part).strip())
    except (TypeError, ValueError):
        raise ConfigError(
            f"shares is {value!r}: it takes equal, auto, or rows per rank such as 3,2."
        ) from None
