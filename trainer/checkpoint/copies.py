"""Copies of checkpoints on other hosts, so that no single disk can lose a run.

    fetch_newer(group, folder, run_id, config, log)       # before rank 0 loads its newest checkpoint
    copies = CheckpointCopies(group, folder, config, log) # when the ranks are connected
    copies.start(newest)                                  # on all ranks, after a step; a thread sends it
    copies.finish(newest)                                 # on all ranks, at the end of the run; not at a stop

The setting checkpoint_copies is the number of hosts that keep each checkpoint: the host of rank 0, the host
that the argument `prefers` names, if it has a rank, and the next hosts in rank order. The first rank of each
host receives the files. If CheckpointCopies cannot make a copy, a warning is logged, and the run continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.checkpoint import storage
from trainer.checkpoint.storage import DamagedCheckpointError
from trainer.checkpoint.transfer import CheckpointTransfer
from trainer.config import ConfigError, RunConfig
from trainer.distributed.process_group import Collectives, Peer
from trainer.distributed.subgroup import Subgroup

POLL_SECONDS = 2.0  # between collective checks whether a transfer has ended: one long one would time out
PROGRESS_SECONDS = 10.0  # between lines of progress at the end of a run
SETTLE_SECONDS = 60.0  # for a copy of any size, at the end of a run
SLOWEST_BYTES_A_SECOND = 2**20  # a slower link counts as hanging
Log = Callable[[str], None]


def first_ranks(peers: Sequence[Peer]) -> list[int]:
    """The first rank of each host, in rank order."""
    hosts: dict[str, int] = {}
    for peer in peers:
        hosts.setdefault(peer.host, peer.rank)
    return list(hosts.values())


class CheckpointCopies:
    """Copies the checkpoints that rank 0 writes in one attempt to other hosts.

    Nothing is sent if the run has one host only, or if checkpoint_copies is 1.
    """

    def __init__(
        self,
        group: Collectives,
        folder: Path,
        config: RunConfig,
        log: Log,
        alive: Callable[[], None] = lambda: None,
        prefers: str = "",
    ) -> None:
        """Connect the hosts that keep copies. All ranks call it.

        group: the ranks. folder: the folder of the checkpoints on this host. config: has checkpoint_copies,
        the number of hosts that keep each checkpoint. log: called with each message. alive: called every few
        seconds while `finish` waits. prefers: name of a host that is chosen before the other hosts; "" for
        none.
        """
        self._group, self._folder, self._log = group, folder, log
        self._alive = alive
        leaders = first_ranks(group.peers)
        leaders.sort(key=lambda rank: (rank != 0, group.peers[rank].host != prefers))
        members = sorted(leaders[: config.checkpoint_copies])
        self._link: Subgroup | None = None
        if len(members) > 1:
            self._link = Subgroup.open(group, "checkpoint copies", members, source=0)
        self._has_copies = self._link is not None
        self._transfer: CheckpointTransfer | None = None
        self._last: str | None = None  # the newest checkpoint whose copy was started
        self._skipped: str | None = None

    def is_due(self, newest: str | None) -> bool:
        """Whether to start a copy of the newest checkpoint now; always False on ranks other than 0.

        False if this copy was started already, if another copy is in progress, or if an error has ended an
        earlier copy of this attempt. newest: path of the newest checkpoint, relative to the run directory;
        None if there is no checkpoint.
        """
        if self._link is None or self._group.rank or newest in (None, self._last):
            return False
        if self._transfer is not None and self._transfer.busy:
            if newest != self._skipped:
                self._log(
                    f"{self._transfer.name} is still being copied to {self._receivers()}: "
                    f"{Path(str(newest)).name} follows."
                )
                self._skipped = newest
            return False
        self._report()
        return self._link is not None

    def start(self, newest: str | None) -> None:
        """Start to copy a checkpoint of rank 0 to the hosts that keep copies.

        All ranks call it after the same step. newest: on rank 0, path of the checkpoint, relative to the run
        directory; ignored on other ranks.
        """
        if self._link is None or not self._link.is_member:
            return
        if self._transfer is not None:
            self._transfer.wait()
            self._report_own()
        path = None
        if self._group.rank == 0:
            self._last = newest
            path = self._folder / Path(str(newest)).name
        self._transfer = CheckpointTransfer(self._link, self._folder, path)

    def stop(self) -> None:
        """Wait until a copy in progress has ended. Call `abandon` of the group first, which ends the copy."""
        if self._transfer is not None:
            self._transfer.wait()
            if self._group.rank == 0 and not self._transfer.lost:
                self._report()

    def finish(self, newest: str | None) -> None:
        """Complete a copy in progress, then copy the newest checkpoint.

        All ranks call it at the end of the run. newest: path of the checkpoint, relative to the run
        directory; ignored on ranks other than 0. A copy may take as long as a link with
        SLOWEST_BYTES_A_SECOND needs, plus SETTLE_SECONDS. Then it is cancelled, and a warning is logged.
        """
        if not self._has_copies:
            return
        self._wait()
        due = self._group.gather_int64(torch.tensor([int(self.is_due(newest))]))
        if int(due[0]):
            self.start(newest)
            self._wait()

    def _wait(self) -> None:
        """Wait on all ranks until rank 0 has sent its checkpoint, or cancels the copy."""
        began = shown = time.monotonic()
        running = True
        while running:
            transfer, busy = self._transfer, False
            if transfer is not None and self._group.rank == 0:
                transfer.wait(POLL_SECONDS)
                busy, now = transfer.busy, time.monotonic()
                if busy and now - began > SETTLE_SECONDS + transfer.size / SLOWEST_BYTES_A_SECOND:
                    self._log(
                        f"warning: The copy of {transfer.name} to {self._receivers()} is not complete "
                        f"after {now - began:.0f} s and is cancelled. The checkpoint on this host is "
                        f"complete. Check the network and the disk of {self._receivers()}."
                    )
                    busy, self._link, self._transfer = False, None, None
                elif busy and now - shown >= PROGRESS_SECONDS:
                    shown, done = now, transfer.sent / 1e6
                    self._log(f"Copying {transfer.name}: {done:,.0f} of {transfer.size / 1e6:,.0f} MB.")
            running = bool(int(self._group.gather_int64(torch.tensor([int(busy)]))[0]))
            self._alive()
        if self._group.rank == 0:
            self._report()
        else:
            self._report_own()

    def _report_own(self) -> None:
        """On a receiver, log a transfer that has failed."""
        if self._group.rank and self._transfer is not None and self._transfer.lost:
            self._log(
                "warning: This host did not receive its copy of a checkpoint from the coordinator: "
                f"{self._transfer.lost.rstrip('.')}. The run and the checkpoint on the coordinator are not "
                "affected. Check the network: ansible-playbook doctor.yml"
            )

    def _report(self) -> None:
        """Log the result of the last transfer. If an error ended it, this attempt makes no more copies."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        if transfer.lost:
            self._log(
                f"warning: The copy of {transfer.name} to {self._receivers()} failed: {transfer.lost} "
                "This attempt makes no more copies."
            )
            self._link = None
            return
        for host, problem in transfer.problems.items():
            self._log(f"warning: {transfer.name} has no copy on {host}: {problem}.")
        good = [host for host in self._receivers().split(", ") if host not in transfer.problems]
        if transfer.sent and good:
            self._log(
                f"Copied {transfer.name} to {', '.join(good)}: {transfer.size / 1e6:,.1f} MB in "
                f"{transfer.seconds:.1f} s in the background."
            )

    def _receivers(self) -> str:
        return ", ".join(peer.host for peer in self._link.peers if peer.rank) if self._link else "other hosts"


def fetch_newer(group: Collectives, folder: Path, run_id: str, config: RunConfig, log: Log) -> None:
    """If another host has a newer undamaged checkpoint of the run than rank 0, copy it to rank 0.

    All ranks call it. Does nothing if checkpoint_copies is 1. group: the ranks. folder: the folder of the
    checkpoints on this host. run_id, config: name and settings of the run. log: called with each message.
    Raises Final if the transfer fails, so that no run continues from an older checkpoint unnoticed.
    """
    leaders = first_ranks(group.peers)
    if config.checkpoint_copies < 2 or len(leaders) < 2:
        return
    step, damaged = _newest_verified(folder, None, -1, log) if group.rank == 0 else (-1, [])
    own = int(group.gather_int64(torch.tensor([step]))[0])
    if group.rank in leaders[1:]:
        storage.remove_leftovers(folder)
        step, _ = _newest_verified(folder, run_id, own, log)
    steps = group.gather_int64(torch.tensor([step])).flatten().tolist()
    source = steps.index(max(steps))  # of equal ones the first, so that of rank 0
    if source == 0:
        return
    link = Subgroup.open(group, "newest checkpoint", [0, source], source)
    host = group.peers[source].host
    transfer, problem = None, ""
    if group.rank == 0:
        own_step = f"{own:,}" if own >= 0 else "none"
        log(f"{host} has the newest checkpoint, of step {max(steps):,}; the coordinator has {own_step}.")
        for path in damaged:
            _set_aside(path)
        transfer = CheckpointTransfer(link, folder, prunes=False)
    elif group.rank == source:
        transfer = CheckpointTransfer(link, folder, folder / f"step_{max(steps):06d}")
    running = True
    while running:
        if transfer is not None:
            transfer.wait(POLL_SECONDS)
        busy = transfer is not None and transfer.busy
        running = bool(group.gather_int64(torch.tensor([int(busy)])).any())
    if group.rank == 0 and transfer is not None:
        problem = transfer.lost or "; ".join(transfer.problems.values())
        if problem:
            problem = (
                f"The coordinator could not copy the newest checkpoint (step {max(steps):,}) from {host}: "
                f"{problem.rstrip('.')}. The run did not start, because it would continue from an older "
                "state. Correct this cause, then start the run again."
            )
            if own >= 0:
                problem += (
                    f" To resume from the coordinator's checkpoint of step {own:,} instead: with the "
                    "playbooks -e checkpoint_copies=1, by hand --checkpoint-copies 1."
                )
        else:
            megabytes = transfer.size / 1e6
            log(f"Received {transfer.name} from {host}: {megabytes:,.1f} MB in {transfer.seconds:.1f} s.")
    group.raise_problems(problem)


def _newest_verified(folder: Path, run_id: str | None, above: int, log: Log) -> tuple[int, list[Path]]:
    """Find the newest undamaged checkpoint in `folder` whose step is above `above`.

    run_id: name of the run whose checkpoints are considered; None: those of all runs. log: called with a
    message for each damaged checkpoint. Returns (step of the checkpoint, paths of the newer, damaged
    checkpoints). The step is -1 if there is no such checkpoint. A checkpoint that cannot be read for another
    reason counts as undamaged if run_id is None, and is ignored otherwise.
    """
    damaged: list[Path] = []
    for path in storage.checkpoints(folder):
        step = int(path.name[5:])
        if step <= above:
            break
        try:
            meta = storage.read_meta(path)
        except DamagedCheckpointError as error:
            log(f"{error} A copy on another host is looked for.")
            damaged.append(path)
            continue
        except ConfigError:
            if run_id is not None:
                continue
            return step, damaged  # rank 0 reports it when it loads it
        if run_id is None or meta.get("run_id", run_id) == run_id:
            return step, damaged
    return -1, damaged


def _set_aside(path: Path) -> None:
    """Rename a damaged checkpoint to damaged_step_NNNNNN, unless that directory exists."""
    aside = path.with_name(f"damaged_{path.name}")
    if not aside.exists():
        path.rename(aside)
