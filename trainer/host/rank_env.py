"""Rank, host and addresses of this process, from the environment that torchrun sets.

Without torchrun there is one rank and no rendezvous store.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from trainer.config import ConfigError

# Of an elastic run: "FIRST_RANK WORLD_SIZE ADDRESS:PORT", then the addresses of all hosts in rank order.
FLEET = "NANOFLEET_RANKS"
MICRO_BATCH = "NANOFLEET_DEVICE_BATCH_SIZE"  # of a host with less memory than the others, or more


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size, host and rendezvous address of this process.

    rank, world_size: the number of this rank, from 0, and the number of ranks at the start of the run. A host
        that was added to an active elastic run has a rank from world_size on.
    local_rank, local_world_size: the same among the ranks of this host.
    host: name of this host.
    master_addr, master_port: address and port of the rendezvous store; "" and 0 if there is only one rank.
    attempt: torchrun's restart count.
    agent_store: whether the agent of torchrun owns the rendezvous store; if not, rank 0 does.
    addresses: IP addresses of all hosts of an elastic run with coordinator_failover, in rank order at launch;
        else empty.
    first_host: index in `addresses` of the host of rank 0. It changes when the hosts elect another
        coordinator.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = "localhost"
    master_addr: str = ""
    master_port: int = 0
    attempt: int = 0
    agent_store: bool = False
    addresses: tuple[str, ...] = ()
    first_host: int = 0

    @classmethod
    def from_environment(cls) -> RankEnv:
        """Read the variables that torchrun sets, and NANOFLEET_RANKS of an elastic run.

        If neither RANK nor NANOFLEET_RANKS is set, there is one rank. Raises ConfigError if a variable is
        missing or invalid, or if variables contradict each other.
        """
        host = os.environ.get("NANOFLEET_HOST") or socket.gethostname()
        if FLEET in os.environ:
            return cls._of_fleet(host)
        if "RANK" not in os.environ:
            return cls(host=host)
        env = cls(
            rank=_number("RANK"),
            world_size=_number("WORLD_SIZE", 1),
            local_rank=_number("LOCAL_RANK", 0),
            local_world_size=_number("LOCAL_WORLD_SIZE", 1),
            host=host,
            master_addr=os.environ.get("MASTER_ADDR", ""),
            master_port=_number("MASTER_PORT", 0),
            attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if not 0 <= env.rank < env.world_size:
            raise ConfigError(
                f"RANK is {env.rank} in the environment, but it must be from 0 to {env.world_size - 1}, "
                f"because WORLD_SIZE is {env.world_size} (1 if not set). Unset RANK, or start the trainer "
                "with torchrun, which sets both."
            )
        if env.world_size > 1 and not (env.master_addr and env.master_port):
            raise ConfigError("MASTER_ADDR and MASTER_PORT are missing: start several ranks by torchrun.")
        return env

    @classmethod
    def _of_fleet(cls, host: str) -> RankEnv:
        """Read NANOFLEET_RANKS, because in an elastic run each torchrun knows only the ranks of its own host.

        host: name of this host. Raises ConfigError if the variable is invalid.
        """
        first, world_size, address, *addresses = [*os.environ[FLEET].split(), *3 * [""]]
        name, _, port = address.rpartition(":")
        if not (first.isdecimal() and world_size.isdecimal() and name and port.isdecimal()):
            raise ConfigError(
                f"{FLEET} is {os.environ[FLEET]!r} in the environment. It must be FIRST_RANK WORLD_SIZE "
                "ADDRESS:PORT, separated by spaces; with coordinator_failover the addresses of all hosts "
                f"follow. ansible-playbook train.yml sets it for an elastic run; else: unset {FLEET}"
            )
        local_rank, local_world_size = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
        hosts = list(filter(None, addresses))
        if hosts and int(world_size) != local_world_size * len(hosts):
            raise ConfigError(
                f"{host} has {local_world_size} rank(s), and the run has {world_size} on {len(hosts)} hosts. "
                "In an elastic run all hosts need the same nproc_per_node: set it for the group fleet, not "
                "for a host."
            )
        return cls(
            rank=int(first) + local_rank,
            world_size=int(world_size),
            local_rank=local_rank,
            local_world_size=local_world_size,
            host=host,
            master_addr=name.strip("[]"),
            master_port=int(port),
            addresses=tuple(hosts),
        )

    @property
    def launch_rank(self) -> int:
        """The rank of this process at launch. It does not change when another host becomes coordinator."""
        return self.launch_rank_of(self.rank)

    def launch_rank_of(self, number: int) -> int:
        """The rank at launch of the process whose `RankEnv.rank` is `number`.

        The two differ after the hosts have elected another coordinator. For a rank that was added to an
        active elastic run, the result is `number`, which is at least the world size.
        """
        first = self.first_host * self.local_world_size
        return (number + first) % self.world_size if number < self.world_size else number

    @property
    def host_index(self) -> int:
        """The number of this host among all hosts of the run, from 0, in the order of the launch ranks."""
        return self.launch_rank // self.local_world_size

    @property
    def is_added(self) -> bool:
        """Whether this host was added to an active elastic run. It trains, but has no part in elections."""
        return self.rank >= self.world_size

    def coordinated_by(self, host: int, port: int) -> RankEnv:
        """The environment of this process after the host with the index `host` has become the coordinator.

        host: index in `addresses`. The first rank of that host becomes 0, and its other ranks and those of
        the next hosts follow. port: port of the rendezvous store on that host; 0 if this process opens the
        store. All hosts have the same number of ranks.
        """
        first = host * self.local_world_size
        return replace(
            self,
            rank=self.rank if self.is_added else (self.launch_rank - first) % self.world_size,
            master_addr=self.addresses[host],
            master_port=port,
            first_host=host,
        )

    @staticmethod
    def micro_batch(default: int) -> int:
        """The number of sequences in a micro-batch on this host.

        It is NANOFLEET_DEVICE_BATCH_SIZE if that variable is set, else `default`. Raises ConfigError if it is
        not a whole number from 1.
        """
        rows = _number(MICRO_BATCH, default)
        if rows < 1:
            raise ConfigError(f"{MICRO_BATCH} is {rows} in the environment: it takes a whole number from 1.")
        return rows

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0, which writes checkpoints and metrics and reports to the tracker."""
        return self.rank == 0

    @property
    def is_host_leader(self) -> bool:
        """Whether this is local rank 0, which writes the files that exist once per host."""
        return self.local_rank == 0

    @property
    def voting(self) -> range:
        """The ranks that vote for their hosts in elections of a coordinator: the first one of each host."""
        return range(0, self.world_size, self.local_world_size)

    @property
    def has_vote(self) -> bool:
        """Whether this rank votes for its host in elections of a coordinator, and can be elected."""
        return self.rank in self.voting

    def address(self) -> str:
        """The IP address of this host on its route to the coordinator; "" without a coordinator or route."""
        if not self.master_addr:
            return ""
        try:
            family, _, _, _, target = socket.getaddrinfo(
                self.master_addr, self.master_port or 9, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # a datagram socket sends nothing when it connects
                return str(probe.getsockname()[0])
        except OSError:
            return ""


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} in the environment: it takes a whole number.") from None
