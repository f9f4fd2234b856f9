"""The local mode: ranks train on their own parameters, and synchronize a part of the model at a time.

Each rank trains all parameters on its own rows of the batch. Every `steps` steps, the pseudo-gradients of the
ranks (the change of their parameters since the last sync round) are averaged, weighted by tokens. An outer
step with Nesterov momentum then updates the outer parameters, which are equal on all ranks. This is DiLoCo
(arXiv 2311.08105), with Muon as inner optimizer (MuLoCo, 2505.23725). Each fragment, a part of the model, has
its sync rounds at other steps, and the transfer overlaps with the next steps (Streaming DiLoCo, 2501.18512).
After the outer step, a rank continues from the outer parameters plus what it has learned since the round
started.

Evaluations, digests and checkpoints do not change the run: they read the outer parameters, and do not
complete a sync round in flight. A checkpoint waits for the bytes of the round and stores them, so that a
resumed run takes the outer step at the same step.

Pseudo-gradients are sent with 8, 4 or 2 bits; error feedback adds the residual of rounding to the next round.
With top-k (trainer/sync/topk.py) a value waits for many rounds until it is among the largest, and there is no
buffer for error feedback. In the parameters of a rank, the outer step then replaces only what the rank has
sent. The rest stays in them, so the next pseudo-gradient contains it. With a buffer, each round would reset
the rank to the outer parameters. The rank would learn the same difference again, and the buffer would add it
each time.

When the members of an elastic run change, the ranks that stay keep their parameters. If a rank has completed
a sync round that is in flight on others, it sends them the outer parameters of the fragment. A round that no
rank has completed is taken back: it is dropped, and started again with the next members. A rank that joins
starts from the outer parameters. It receives them before it joins, while the others train
(trainer/elastic/prefetch.py); when it joins, only fragments that have changed since are sent again.

Every rank sums the same bytes in the same order, by operations that round once, so that different CPUs get
equal sums.

The second moments of AdamW are averages over as many tokens as if all ranks stepped together: beta2 is raised
to the power of a rank's fraction of the tokens (arXiv 2507.07101). With an unchanged beta2, lm_head learns
worse, however often ranks synchronize: the second moment of a rare token's row decays before the token occurs
again, and its update is then divided by too small a number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Collectives
from trainer.distributed.transfer import send_tensor
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.buckets import add_only_active_rows
from trainer.sync.compressor import make_compressor
from trainer.sync.fragment import (
    NEVER,
    ROUND,
    Fragment,
    Outer,
    SyncRound,
    done,
    make_fragments,
    rows_of,
    saved,
    write_rows,
)
from trainer.sync.mode import SyncMode

FINAL_BITS = 8  # with top-k, of the round after the last step
COUNT_BYTES = 8  # the token count of a rank, an int64 that follows its packed values


class Local(SyncMode):
    """The sync mode local: each rank trains its own parameters, and sync rounds average the changes.

    A sync round updates the outer parameters, which are equal on all ranks. group: the ranks. model,
    optimizer: those of this rank. outer: the settings of sync=local; None: their defaults.
    """

    def __init__(
        self, group: Collectives, model: nn.Module, optimizer: MuonAdamW, outer: Outer | None = None
    ) -> None:
        self._group, self._model, self._optimizer = group, model, optimizer
        self._outer = outer or Outer()
        self._step = 0
        self._rates_of = {p: g for g in optimizer.param_groups for p in g["params"]}
        self._betas = [(g, *g["betas"]) for g in optimizer.param_groups if g["kind"] == "adamw"]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        add_only_active_rows(model)
        self._fragments = make_fragments(model, self._outer)
        self._tables = [f for f in self._fragments if f.active_at is not None]
        self._active = torch.empty(0, dtype=torch.int64)
        self._lock = threading.Lock()  # held while outer parameters change: another thread may copy them
        self._is_swapped = False  # whether the model holds the outer parameters

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self, active: Tensor, by_rank: Sequence[Tensor] = ()) -> None:
        """Set all gradients to 0. active: the token ids in the inputs of all ranks, this rank included."""
        tables = {f.parameters[0] for f in self._tables}
        for p in self._model.parameters():
            assert p.grad is not None
            if p in tables:
                p.grad.index_fill_(0, self._active.to(p.device), 0)
            else:
                p.grad.zero_()
        self._active = active
        for fragment in self._tables:
            assert fragment.active_at is not None
            fragment.active_at[active.cpu()] = self._step + 1

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Divide the gradients of this rank by its own tokens, and scale AdamW's beta2. Nothing is sent."""
        mine = mine or tokens // self._group.world_size
        for p in self._model.parameters():
            assert p.grad is not None
            p.grad.div_(mine)
        for rates, beta1, beta2 in self._betas:
            rates["betas"] = (beta1, beta2 ** (mine / tokens))
        for fragment in self._fragments:
            fragment.tokens += mine

    def step(self) -> None:
        self._optimizer.step()
        for fragment in self._tables:
            rates = self._rates_of[fragment.parameters[0]]
            fragment.decay *= 1 - rates["lr"] * rates["weight_decay"]

    def broadcast(self) -> None:
        """Count the step as completed, start the sync rounds that are due, and finish old ones.

        A sync round is finished local_delay steps after its start. This waits for the bytes of other ranks.
        """
        self._step += 1
        for fragment in self._fragments:
            scheduled = self._is_scheduled(fragment, self._step)
            if (scheduled or fragment.is_due) and not fragment.sync_round:
                self._start_round(fragment)
        for fragment in self._fragments:
            if fragment.sync_round and fragment.sync_round.started_at + self._outer.delay <= self._step:
                self._finish_round(fragment)

    def _is_scheduled(self, fragment: Fragment, step: int) -> bool:
        return (step - fragment.sync_at) % self._outer.steps == 0

    @property
    def completed_steps(self) -> int:
        """The number of completed steps of the run, with those before this rank joined."""
        return self._step

    def is_idle(self) -> bool:
        return not any(fragment.sync_round for fragment in self._fragments)

    # -- sync rounds -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_round(self, fragment: Fragment) -> None:
        """Start to exchange the pseudo-gradients since the last round, with an all-gather."""
        rows = fragment.rows()
        deltas = [outer - p for outer, p in zip(fragment.outer, fragment.parameters, strict=True)]
        delta = torch.cat([rows_of(delta, rows).flatten() for delta in deltas])
        if fragment.error:
            delta += torch.cat([rows_of(error, rows).flatten() for error in fragment.error])
        packed = fragment.compressor.pack(delta)
        unpacked = fragment.compressor.unpack(packed, delta.numel(), delta.dtype)
        count = torch.tensor([fragment.tokens], device=delta.device).view(torch.uint8)
        table, pending = self._group.start_all_gather(torch.cat([packed, count]))
        if fragment.error:
            write_rows(fragment.error, rows, delta - unpacked)
            sent = [p.detach().clone() for p in fragment.parameters]
        else:
            sent = fragment.apply_to_outer(unpacked, rows)
        own = self._group.rank, fragment.tokens
        fragment.sync_round = SyncRound(self._step, sent, rows, fragment.decay, table, pending, *own)
        fragment.tokens, fragment.decay, fragment.is_due = 0, 1.0, False
        fragment.synced_at = self._step

    @torch.no_grad()
    def _finish_round(self, fragment: Fragment) -> None:
        """Wait for the pseudo-gradients of all ranks and take the outer step."""
        sync_round = fragment.sync_round
        assert sync_round is not None
        self._group.wait([sync_round.pending])
        deltas = [torch.zeros_like(outer) for outer in fragment.outer]
        if sync_round.rows is not None:  # rows without tokens have only decayed, equally on every rank
            torch.mul(fragment.outer[0], 1 - sync_round.decay, out=deltas[0])
        write_rows(deltas, sync_round.rows, self._mean(sync_round, fragment))
        with self._lock:
            self._take_outer_step(fragment, sync_round, deltas)

    def _take_outer_step(self, fragment: Fragment, sync_round: SyncRound, deltas: list[Tensor]) -> None:
        """Take the outer step of a complete round. deltas: the mean of the pseudo-gradients, by parameter."""
        fragment.sync_round, fragment.completed = None, sync_round.started_at
        fragment.checksum = sync_round.table.sum(dtype=torch.int64)
        for parameter, outer, momentum, delta, sent in zip(
            fragment.parameters,
            fragment.outer,
            fragment.momentum,
            deltas,
            sync_round.sent_parameters,
            strict=True,
        ):
            momentum.mul_(self._outer.momentum).add_(delta)
            outer.sub_((momentum * self._outer.momentum).add_(delta).mul_(self._outer.lr))
            if sync_round.started_at == self._step and fragment.error:
                parameter.copy_(outer)
            else:
                parameter.add_(outer - sent)

    def _mean(self, sync_round: SyncRound, fragment: Fragment) -> Tensor:
        """The flat mean of the pseudo-gradients, weighted by tokens; equal bits on every rank."""
        values, counts = sync_round.table[:, :-COUNT_BYTES], sync_round.table[:, -COUNT_BYTES:]
        tokens = counts.flatten().clone().view(torch.int64).double()  # a copy is aligned for int64
        dtype = fragment.outer[0].dtype
        weights = (tokens / tokens.sum()).to(dtype)
        n = sum(rows_of(outer, sync_round.rows).numel() for outer in fragment.outer)
        mean = torch.zeros(n, dtype=dtype, device=values.device)
        for packed, weight in zip(values, weights, strict=True):
            mean += fragment.compressor.unpack(packed, n, dtype).mul_(weight)
        return mean

    def _finish_all_rounds(self) -> None:
        for fragment in self._fragments:
            if fragment.sync_round:
                self._finish_round(fragment)

    # -- a change of the members -------------------------------------------------------------------------

    @torch.no_grad()
    def regroup(self, group: Collectives, step: int, is_new: bool, last: int) -> int:
        """Continue with the ranks of `group`; returns the number of completed steps from which they continue.

        The result is `step`, or, if a rank is more than one step ahead of it, one less than the steps of that
        rank, but at most `last`. All ranks of `group` call it; if a rank is lost meanwhile, the ranks call it
        again with their next group. step: number of steps that rank 0 has completed. is_new: whether this
        rank has just joined and receives the outer parameters from the other ranks; False on rank 0. last:
        one less than the steps of the run, so that the last step, after which the run is saved, is trained
        again. Raises PeerLost if a rank is lost.
        """
        for fragment in self._fragments:
            fragment.compressor = fragment.make_compressor(self._outer)
            if fragment.sync_round and fragment.sync_round.pending is done:
                self._finish_round(fragment)
        self._group = group
        steps = group.gather_int64(torch.tensor([-1 if is_new else self._step])).flatten().tolist()
        is_ahead = max(steps) > step + 1
        leader = steps.index(max(steps)) if is_ahead else 0
        step = min(max(steps) - 1 if is_ahead else step, last)  # the leader's last step may be incomplete
        rounds = [(NEVER if is_new else each.completed, int(each.checksum)) for each in self._fragments]
        of_ranks = group.gather_int64(torch.tensor(rounds).flatten()).view(group.world_size, -1, 2)
        for fragment, by_rank in zip(self._fragments, of_ranks.transpose(0, 1).tolist(), strict=True):
            newest = max(completed for completed, _ in by_rank)
            source = next(rank for rank in (leader, *range(len(by_rank))) if by_rank[rank][0] == newest)
            behind = [rank for rank, known in enumerate(by_rank) if known != by_rank[source]]
            if behind:
                self._send_outer(fragment, source, behind, *by_rank[source])
            if fragment.sync_round:
                self._take_back(fragment)
        late = [rank for rank, own in enumerate(steps) if own < step]  # new ranks, and ranks behind
        for fragment in self._tables if late else []:
            assert fragment.active_at is not None
            fragment.active_at.copy_(send_tensor(group, fragment.active_at, leader, late))
        due = [fragment.is_due for fragment in self._fragments]
        is_due = group.gather_int64(torch.tensor(due, dtype=torch.int64)).any(0).tolist()
        decays = torch.tensor([fragment.decay for fragment in self._fragments], dtype=torch.float64)
        synced_at = torch.tensor([fragment.synced_at for fragment in self._fragments])
        group.broadcast_owned({leader: decays})
        group.broadcast_owned({leader: synced_at})
        for i, fragment in enumerate(self._fragments):
            fragment.is_due, fragment.decay = is_due[i], float(decays[i])
            fragment.synced_at = int(synced_at[i])
        self._step = step
        return step

    def _send_outer(
        self, fragment: Fragment, source: int, behind: Sequence[int], completed: int, checksum: int
    ) -> None:
        """Send the outer parameters of `fragment` from rank `source` to the ranks `behind`.

        completed, checksum: start step and checksum of the last round that `source` has completed. A rank
        that takes part in this round keeps its changes since the start of the round; another rank continues
        from the outer parameters.
        """
        group = self._group
        sent = [*fragment.outer, *fragment.momentum]
        received = [send_tensor(group, tensor, source, behind) for tensor in sent]
        if group.rank not in behind:
            return
        sync_round, fragment.sync_round = fragment.sync_round, None
        takes_part = sync_round is not None and sync_round.started_at == completed
        for i, parameter in enumerate(fragment.parameters):
            outer = received[i]
            if takes_part and sync_round:
                parameter.add_(outer - sync_round.sent_parameters[i])
            else:
                parameter.copy_(outer)
                if fragment.error:
                    fragment.error[i].zero_()
            fragment.outer[i].copy_(outer)
            fragment.momentum[i].copy_(received[len(fragment.parameters) + i])
        fragment.tokens = fragment.tokens if takes_part else 0
        fragment.completed, fragment.checksum = completed, torch.tensor(checksum)

    def _take_back(self, fragment: Fragment) -> None:
        """Drop the round in flight of `fragment`, as if this rank had not taken part; it is started again."""
        sync_round, fragment.sync_round = fragment.sync_round, None
        assert sync_round is not None
        rows = sync_round.rows
        if fragment.error:
            pairs = zip(fragment.outer, sync_round.sent_parameters, strict=True)
            delta = torch.cat([rows_of(outer - sent, rows).flatten() for outer, sent in pairs])
            packed = sync_round.table[sync_round.rank, :-COUNT_BYTES]
            unpacked = fragment.compressor.unpack(packed, delta.numel(), delta.dtype)
            error = torch.cat([rows_of(error, rows).flatten() for error in fragment.error])
            write_rows(fragment.error, rows, error + unpacked - delta)
        fragment.tokens += sync_round.tokens
        fragment.decay *= sync_round.decay
        fragment.synced_at = sync_round.started_at - self._outer.steps
        fragment.is_due = True

    # -- state -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._finish_all_rounds()
        for fragment in self._fragments:
            if self._outer.keeps_residual:  # a last round of all values
                fragment.compressor, fragment.tokens = make_compressor(FINAL_BITS), max(1, fragment.tokens)
            if fragment.tokens:
                self._start_round(fragment)
        self._finish_all_rounds()
        for fragment in self._fragments:
            for parameter, outer in zip(fragment.parameters, fragment.outer, strict=True):
                parameter.detach().copy_(outer)
            fragment.compressor = fragment.make_compressor(self._outer)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Swap the tensors of the model's parameters with those of the outer parameters, without a copy."""
        with self._lock:
            self._is_swapped = not self._is_swapped
            for fragment in self._fragments:
                for i, p in enumerate(fragment.parameters):
                    p.data, fragment.outer[i] = fragment.outer[i], p.data

    def copy_outer(self, known: dict[int, tuple[int, int]]) -> Iterator[dict[str, Tensor]]:
        """Yield a copy of the outer state of each fragment, one at a time, while another thread trains.

        A copy is {"0": tensor, "1": tensor, ...}, on the CPU. Tensor 0 has three numbers: the fragment, the
        start step of its last complete round, and the checksum of this round. The other tensors are the outer
        parameters, their momentum and, for an embedding, the last active step of each row.
        known: {fragment: (start step, checksum)} of the copies that the receiver has. A fragment with the
        same values is left out. Yielded fragments are added to `known`.
        """
        for number, fragment in enumerate(self._fragments):
            with self._lock:
                completed = fragment.completed, int(fragment.checksum)
                if known.get(number) == completed:
                    continue
                outer = [p.detach() for p in fragment.parameters] if self._is_swapped else fragment.outer
                tables = [] if fragment.active_at is None else [fragment.active_at]
                state = [torch.tensor([number, *completed]), *outer, *fragment.momentum, *tables]
                copied = {str(i): tensor.cpu().clone() for i, tensor in enumerate(state)}
            known[number] = completed
            yield copied

    @torch.no_grad()
    def load_outer(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Load the copies that `copy_outer` of another rank has yielded, into the model's parameters too."""
        for state in states:
            (number, completed, checksum), *tensors = state.values()
            fragment = self._fragments[int(number)]
            tables = [] if fragment.active_at is None else [fragment.active_at]
            for own, tensor in zip([*fragment.outer, *fragment.momentum, *tables], tensors, strict=True):
                own.copy_(tensor)
            for parameter, outer in zip(fragment.parameters, fragment.outer, strict=True):
                parameter.copy_(outer)
            fragment.completed, fragment.checksum = int(completed), checksum

    def takes_outer_step(self, step: int) -> bool:
        """Whether a sync round that is not complete yet completes after `step`, counted from 1.

        step: the step that this rank trains, or the one that it has just completed.
        """
        delay = self._outer.delay
        for fragment in self._fragments:
            in_flight = fragment.sync_round
            if in_flight and in_flight.started_at + delay <= step:
                return True
            is_started = fragment.is_due or self._is_scheduled(fragment, step)
            if is_started and not (in_flight or delay) and fragment.completed < step:
                return True
        return False

    def common_state(self) -> dict[str, ParameterState]:
        """The state that is equal on all ranks; see SyncMode.

        State of each parameter: `momentum` (of the outer step) and `synced_at` (step of the last sync round).
        An embedding also has `active_at` (for each row, the last step at which it was active) and `decay`
        (weight decay, as a factor, of a row without tokens). The first parameter of a fragment also has the
        state of a round in flight (`SyncRound.common_state`).
        """
        states: dict[str, ParameterState] = {}
        for fragment in self._fragments:
            states |= fragment.common_state(fragment.synced_at, fragment.decay)
            if fragment.sync_round:
                self._group.wait([fragment.sync_round.pending])  # without the outer step
                fragment.sync_round = fragment.sync_round._replace(pending=done)
                states[fragment.names[0]] |= fragment.sync_round.common_state()
        return states

    def state_without_rounds(self) -> dict[str, ParameterState]:
        """The result of `common_state` as if the rounds in flight had not started. Changes nothing."""
        states: dict[str, ParameterState] = {}
        for fragment in self._fragments:
            synced_at, decay = fragment.synced_at, fragment.decay
            if sync_round := fragment.sync_round:
                synced_at, decay = sync_round.started_at - self._outer.steps, decay * sync_round.decay
            states |= fragment.common_state(synced_at, decay)
        return states

    def rank_state(self) -> dict[str, Tensor]:
        """The state of this rank, see SyncMode: {KIND/PARAMETER: tensor}, with these kinds:

        own: the parameter of this rank. tokens: number of tokens of this rank since the last sync round.
        error: error feedback, if there is a buffer for it. sent: `sent_parameters` of a round in flight.
        """
        tensors: dict[str, Tensor] = {}
        for fragment in self._fragments:
            for name, value in zip(fragment.names, fragment.outer, strict=True):
                tensors[f"own/{name}"] = value  # within `shared_parameters`, where the two are swapped
                tensors[f"tokens/{name}"] = torch.tensor(fragment.tokens)
            errors = zip(fragment.names, fragment.error, strict=bool(fragment.error))
            tensors |= {f"error/{name}": error for name, error in errors}
            if fragment.sync_round:
                sent = zip(fragment.names, fragment.sync_round.sent_parameters, strict=True)
                tensors |= {f"sent/{name}": value for name, value in sent}
        return tensors

    @torch.no_grad()
    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None:
        self._step = step
        for fragment in self._fragments:
            for i, (name, p) in enumerate(zip(fragment.names, fragment.parameters, strict=True)):
                fragment.outer[i].copy_(p)
                if name not in common:
                    continue
                state = common[name]
                fragment.momentum[i].copy_(state["momentum"])
                fragment.synced_at = fragment.completed = int(saved(state, "synced_at"))
                if fragment.active_at is not None:
                    fragment.active_at.copy_(saved(state, "active_at"))
                    fragment.decay = float(saved(state, "decay"))
                if own:
                    older = f"here/{name}"
                    p.copy_(own[older if older in own else f"own/{name}"])
                    if fragment.error:
                        fragment.error[i].copy_(own[f"error/{name}"])
                    fragment.tokens = int(own[f"tokens/{name}"])
            state = common.get(fragment.names[0], {})
            if f"{ROUND}table" in state:
                # A rank without saved state continues from the outer parameters, as if it had sent them.
                pairs = zip(fragment.names, fragment.outer, strict=True)
                sent_parameters = [own.get(f"sent/{name}", p).to(p.device, copy=True) for name, p in pairs]
                fragment.sync_round = SyncRound.from_state(state, sent_parameters)
                fragment.completed -= self._outer.steps
