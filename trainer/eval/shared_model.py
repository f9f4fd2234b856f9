"""The model of a checkpoint on all ranks: rank 0 reads it and sends it to the others.

shared = SharedModel(env, store, checkpoint)
shared.announce()        # before the process group exists: all ranks know the checkpoint's meta.json
shared.read()            # rank 0: model and tokenizer
model, tokenizer = shared.broadcast(group)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.storage import load_model, model_from, read_meta
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.distributed.rendezvous import wait_for_keys
from trainer.distributed.transfer import broadcast_tensors
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT
from trainer.outcome import Retryable

KEY = "eval/checkpoint"  # in the rendezvous store: what `announce` sends
ANNOUNCED = ("step", "run_id", "config", "model_config", "sha256", "schema")
ARRIVAL_SECONDS = 180.0  # for a host that imports torch slowly
TOKENIZER = "tokenizer.json"  # among the tensors of the broadcast; no parameter has this name


class SharedModel:
    """The checkpoint that all ranks evaluate, of which only rank 0 has the files.

    env: environment of this rank. store: the rendezvous store; None with one rank. checkpoint: directory of
    the checkpoint on rank 0. After `announce`, the attribute `meta` has on all ranks the keys ANNOUNCED of
    the checkpoint's meta.json; it is {} if the checkpoint cannot be used.
    """

    def __init__(self, env: RankEnv, store: dist.Store | None, checkpoint: Path) -> None:
        self.env, self.store, self.checkpoint = env, store, checkpoint
        self.meta: dict[str, Any] = {}
        self._read: tuple[GPT, Tokenizer] | None = None

    def announce(self) -> None:
        """Read meta.json on rank 0 and send it to the other ranks, which set `meta`.

        Raises ConfigError on rank 0 if the checkpoint cannot be used; `meta` is then {} on the other ranks.
        Raises Retryable on the other ranks if rank 0 sends nothing in time or has ended.
        """
        if not self.env.is_coordinator:
            self.meta = self._receive()
            return
        try:
            meta = read_meta(self.checkpoint, ())
            self.meta = {name: meta.get(name) for name in ANNOUNCED}
        finally:
            if self.store is not None:
                self.store.set(KEY, json.dumps(self.meta))

    def _receive(self) -> dict[str, Any]:
        assert self.store is not None
        try:
            if wait_for_keys(self.store, {0: KEY}, ARRIVAL_SECONDS):
                raise Retryable(
                    f"Rank 0 did not read the checkpoint within {ARRIVAL_SECONDS:.0f} s. Read its log."
                )
            return dict(json.loads(self.store.get(KEY)))
        except RuntimeError as error:
            raise Retryable(
                f"The rendezvous store was lost: rank 0 or its host has ended ({error})."
            ) from None

    def read(self) -> Tokenizer | None:
        """On rank 0, load and verify model and tokenizer; returns the tokenizer. None on the other ranks.

        Raises ConfigError or DataError if they cannot be loaded.
        """
        if self.env.is_coordinator:
            self._read = load_model(self.checkpoint)
        return self._read and self._read[1]

    def broadcast(self, group: Collectives) -> tuple[GPT, Tokenizer]:
        """Broadcast model and tokenizer of rank 0; returns them on every rank.

        A collective call. Raises PeerLost if a rank is lost.
        """
        if group.world_size == 1:
            assert self._read is not None
            return self._read
        tensors = None
        if self._read is not None:
            model, tokenizer = self._read
            text = torch.frombuffer(bytearray(tokenizer.to_json()), dtype=torch.uint8)
            tensors = {TOKENIZER: text, **model.state_dict()}
        received = broadcast_tensors(group, tensors)
        if self._read is not None:
            return self._read
        tokenizer = Tokenizer.from_json(received.pop(TOKENIZER).numpy().tobytes())
        return model_from(self.meta["model_config"], received), tokenizer
