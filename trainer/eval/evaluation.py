"""Evaluates a checkpoint on one rank or several: loads it, evaluates each part, reports the results.

    Evaluation(args, parts, env, log).run()      # args of trainer.eval.cli

Rank 0 reads the checkpoint and sends it to the other ranks. Before anything is computed, the ranks verify
that they have the same CORE bundle, data and options. Rank 0 reports the results and writes them to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trainer.chat.engine import Sampling
from trainer.checkpoint.storage import model_file
from trainer.code_digest import code_digest
from trainer.config import ConfigError, RunConfig
from trainer.data import DataError
from trainer.data.dataset import Dataset
from trainer.data.tokenizer import FILE_NAME, Tokenizer
from trainer.distributed import consistency
from trainer.distributed.process_group import Collectives
from trainer.distributed.rendezvous import join_store
from trainer.eval import bits_per_byte, sample
from trainer.eval.chat_tasks import GREEDY, ChatTask, check_letter, evaluate_task, read_task
from trainer.eval.core import BlockProgress, TaskResult, evaluate_core, task_result
from trainer.eval.core_bundle import Bundle, read_bundle
from trainer.eval.core_download import fetch_bundle
from trainer.eval.parts import Parts
from trainer.eval.results import Results
from trainer.eval.shared_model import ARRIVAL_SECONDS, SharedModel
from trainer.formatting import counted, duration
from trainer.host.gemm_library import choose_library
from trainer.host.logger import RunLogger, fields
from trainer.host.numerics import limit_threads
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT
from trainer.tracking import evaluations

PROGRESS_SECONDS = 10.0  # between two lines
NAME = "eval"  # in the place of a run_id


class Evaluation:
    """Evaluates a checkpoint on one rank or several: bits per byte, CORE, a sample of text, chat tasks.

    args: options of `python -m trainer eval`. parts: which of these four parts to evaluate. env, log:
    environment and logger of this rank. `run` is a collective call; on rank 0 the results are then in the
    attribute `results`.
    """

    shared: SharedModel
    model: GPT
    tokenizer: Tokenizer
    group: Collectives
    results: Results

    def __init__(self, args: argparse.Namespace, parts: Parts, env: RankEnv, log: RunLogger) -> None:
        self.args, self.parts, self.env, self.log = args, parts, env, log
        self.device = self._device()
        self.data: Dataset | None = None
        self.bundle: Bundle | None = None
        self.chat = list[ChatTask]()
        self.finished: dict[str, list[int]] = {}  # CORE tasks: right answers and items; on rank 0
        self._reported_at = 0.0

    def run(self) -> None:
        """Evaluate all parts in `parts`, and report the results.

        Raises RunEnd if the ranks differ or one is lost, ConfigError or DataError if an option, the
        checkpoint or a data file cannot be used.
        """
        self._connect()
        self.model, self.tokenizer = self.shared.broadcast(self.group)
        self.model.to(self.device)
        if self.env.is_coordinator:
            step, ranks = self.meta["step"], counted(self.env.world_size, "rank")
            text = f"{self.args.checkpoint}: step {step}, evaluated by {ranks} on {self.device.type}"
            self.log.info(text, extra=fields("checkpoint", step=step))
        if self.parts.bpb:
            self._evaluate_bpb()
        if self.parts.sample and self.env.is_coordinator:
            self._write_sample()
        if self.bundle is not None:
            self._evaluate_core(self.bundle)
        if self.chat:
            self._evaluate_chat()
        self.group.close()
        if self.env.is_coordinator and self.args.out:
            self.log.info(f"The results are in {self.args.out}.", extra=fields("out"))
            self._track()

    # -- before ----------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        has_gpu = torch.cuda.is_available()
        if self.args.device == "cuda" and not has_gpu:
            raise ConfigError("--device is cuda, and torch finds no GPU here. Give --device cpu.")
        if self.args.device == "cpu" or not has_gpu:
            limit_threads(self.env.local_world_size)
            choose_library()
            return torch.device("cpu")
        device = torch.device("cuda", self.env.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _connect(self) -> None:
        """Load checkpoint, data and tasks, compare them with the other ranks, and open the process group."""
        store = join_store(self.env, NAME) if self.env.world_size > 1 else None
        self.shared = SharedModel(self.env, store, self.args.checkpoint)
        problem, compared = "", {}
        try:
            self.shared.announce()
            compared = self._load() if self.shared.meta else {}
        except (ConfigError, DataError) as error:
            if store is None:
                raise
            problem = str(error)
        record = consistency.Record(
            self.env.rank, self.env.host, self.env.address(), compared if not problem else {}, {}, problem
        )
        # Under eval.yml the rows are packed before, and a rank that is late is lost.
        seconds = ARRIVAL_SECONDS if self.args.run_dir else consistency.LOADING_SECONDS
        records = consistency.check_consistency(store, record, self.env.world_size, seconds)
        self.group = Collectives.open(self.env, [each.peer for each in records], store, self.device)

    def _load(self) -> dict[str, str]:
        """Load data and CORE bundle, and on rank 0 the checkpoint.

        Returns {name: text} of the values that must be equal on all ranks.
        """
        args, meta = self.args, self.meta
        compared = {"trainer code": code_digest()[:16], "device": self.device.type}
        compared |= {"parts": f"{self.parts.bpb} {self.parts.core is not None} {self.parts.sample}"}
        hashes = {
            name: meta["sha256"][name]
            for name in (model_file(args.checkpoint, meta).name, f"tokenizer/{FILE_NAME}")
        }
        identity = {"step": meta["step"], "run_id": meta["run_id"] or "", "sha256": hashes}
        self.results = Results(args.out if self.env.is_coordinator else None, identity)
        if self.parts.core is not None:
            if args.core_url:
                fetch_bundle(args.core_url, args.core_sha256.lower(), self.parts.core)
            self.bundle = read_bundle(self.parts.core).limited(args.core_max_per_task)
            self.finished = self.results.begin_core(self.bundle, args.core_max_per_task)
            compared |= {"CORE bundle": self.bundle.digest[:16], "max per task": str(args.core_max_per_task)}
        self.chat = [read_task(path) for path in self.parts.chat]
        compared |= {f"questions {task.name}": task.digest[:16] for task in self.chat}
        compared |= {"answers": f"{args.chat_samples} {self._sampling()}"} if self.chat else {}
        tokenizer = self.shared.read()
        if tokenizer is not None:
            letters = {letter for task in self.chat for each in task.questions for letter in each.letters}
            for letter in sorted(letters):
                check_letter(tokenizer, letter)
        if self.parts.bpb:
            self.data = Dataset.open(args.data_dir, meta["model_config"]["sequence_len"])
            if tokenizer is not None and self.data.tokenizer != tokenizer:
                raise ConfigError(
                    f"The data in {args.data_dir} have another tokenizer than the checkpoint "
                    f"{args.checkpoint}. Give the --data-dir that it was trained on."
                )
            compared |= self.data.hashes | {"eval tokens": str(self._eval_tokens())}
        return compared

    @property
    def meta(self) -> dict[str, Any]:
        """The content of the checkpoint's meta.json, as in `SharedModel.meta`."""
        return self.shared.meta

    def _config(self) -> RunConfig:
        return RunConfig.from_strings(self.meta["config"])

    def _eval_tokens(self) -> int:
        return int(self.args.eval_tokens or self._config().eval_tokens)

    # -- the parts -------------------------------------------------------------------------------------

    def _evaluate_bpb(self) -> None:
        assert self.data is not None
        bpb, loss = bits_per_byte.evaluate(
            self.model,
            self.data.val,
            torch.from_numpy(self.data.tokenizer.token_bytes),
            self._eval_tokens(),
            self.env.micro_batch(self._config().device_batch_size),
            self.group,
            [1] * self.env.world_size,
        )
        if self.env.is_coordinator:
            result = {"val_bpb": bpb, "val_loss": loss, "eval_tokens": self._eval_tokens()}
            self.results.add("bpb", result)
            text = f"{bpb:.4f} bits per byte, validation loss {loss:.4f}"
            self.log.info(text, extra=fields("bpb", **result))

    def _write_sample(self) -> None:
        text = sample.sample(self.model, self.tokenizer, self._config().stage)
        self.results.add("sample", text)
        self.log.info(f"sample: {text}", extra=fields("sample", sample=text))

    def _evaluate_core(self, bundle: Bundle) -> None:
        # Only rank 0 knows the finished tasks.
        known = json.dumps(self.finished).encode() if self.env.is_coordinator else b""
        counts = json.loads(self.group.gather_bytes(known)[0])
        finished = {
            task.label: task_result(task, *counts[task.label])
            for task in bundle.tasks
            if task.label in counts
        }
        if finished and self.env.is_coordinator:
            text = f"CORE: {counted(len(finished), 'task')} of {len(bundle.tasks)} were finished before."
            self.log.info(text, extra=fields("core_resumed", tasks=list(finished)))
        result = evaluate_core(
            self.model,
            self.tokenizer,
            bundle,
            self.group,
            finished,
            self._report_progress,
            self._report_task,
        )
        if self.env.is_coordinator:
            self.results.add_core(result, self.args.core_max_per_task)
            self.log.info(result.describe(), extra=fields("core", **result.to_dict()))

    def _sampling(self) -> Sampling:
        args = self.args
        return replace(GREEDY, temperature=args.chat_temperature, max_tokens=args.chat_max_tokens)

    def _evaluate_chat(self) -> None:
        results = {}
        for task in self.chat:
            report = partial(self._report_questions, task)
            asked = (self._sampling(), self.args.chat_samples, report)
            result = evaluate_task(self.model, self.tokenizer, task, self.group, *asked)
            results[task.name] = result
            if self.env.is_coordinator:
                text = f"accuracy {result.accuracy:.4f}, centered {result.centered:.4f}"
                self.log.info(
                    f"{task.name}: {text} ({counted(result.items, 'question')})",
                    extra=fields("chat_task", task=task.name, **result.to_dict()),
                )
        if self.env.is_coordinator:
            metric = sum(result.centered for result in results.values()) / len(results)
            tasks = {name: result.to_dict() for name, result in results.items()}
            found = {"chatcore_metric": metric, "tasks": tasks}
            self.results.add("chat", found)
            text = f"the mean of these {len(results)} task(s); 0 is guessing, 1 is all correct"
            self.log.info(f"ChatCORE {metric:.4f}: {text}", extra=fields("chat", **found))

    def _track(self) -> None:
        """Send the results to the tracker at MLFLOW_TRACKING_URI, if that is set. Only rank 0 calls it."""
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri:
            step, parts = int(self.meta["step"]), self.results.parts
            text = evaluations.send(self.args.checkpoint, step, self.args.out, parts, uri)
            self.log.info(text, extra=fields("tracked"))

    def _report_questions(self, task: ChatTask, done: int) -> None:
        if self.env.is_coordinator and done and time.monotonic() - self._reported_at >= PROGRESS_SECONDS:
            self._reported_at = time.monotonic()
            text = f"{task.name}: {done} of {counted(len(task.questions), 'question')}"
            self.log.info(text, extra=fields("chat_progress", task=task.name, done=done))

    def _report_progress(self, progress: BlockProgress) -> None:
        if not self.env.is_coordinator or time.monotonic() - self._reported_at < PROGRESS_SECONDS:
            return
        self._reported_at = time.monotonic()
        left = progress.seconds_left
        eta = "" if left is None else f"; about {duration(left)} left for all tasks"
        self.log.info(
            f"CORE {progress.task}: {progress.done} of {counted(progress.items, 'item')}{eta}",
            extra=fields("core_progress", task=progress.task, done=progress.done, eta_seconds=left),
        )

    def _report_task(self, label: str, result: TaskResult, seconds: float) -> None:
        if self.env.is_coordinator:
            self.results.add_task(label, result)
            self.log.info(
                task_line(label, result, seconds),
                extra=fields(
                    "core_task",
                    task=label,
                    accuracy=result.accuracy,
                    centered=result.centered,
                    seconds=seconds,
                ),
            )


def task_line(label: str, result: TaskResult, seconds: float) -> str:
    """The log line for a finished CORE task. seconds: how long the evaluation of the task took."""
    return (
        f"CORE {label}: accuracy {result.accuracy:.4f}, centered {result.centered:.4f} "
        f"({counted(result.items, 'item')}, {duration(seconds)})"
    )
