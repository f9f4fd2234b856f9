"""python -m trainer threads: find the processors and the number of threads that are fastest on this host.

python -m trainer threads                                  depth 8, 2 rows of 1,024 tokens, float32
python -m trainer threads --depth 12 --dtype bfloat16

It times the work of a layer on each set of processors that the topology of this host suggests. It prints a
table of the times, and the settings that bind a run to the fastest set. A run with threads=auto measures in
the same manner at its first start; the settings make the choice permanent.
"""

from __future__ import annotations

import argparse

from trainer.config import ConfigError, RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `threads` to `parser`."""
    default = RunConfig()
    parser.add_argument("--depth", type=int, default=default.depth, metavar="N", help="layers (%(default)s)")
    parser.add_argument(
        "--rows",
        type=int,
        default=default.device_batch_size,
        metavar="N",
        help="rows of a micro-batch (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="format of GEMMs (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, then print the table and the settings; returns the exit code 0.

    Raises ConfigError if an option is invalid, or if this system cannot bind threads to processors.
    """
    config = RunConfig(depth=args.depth, device_batch_size=args.rows)
    from trainer.host.pinning import can_pin

    if not can_pin():
        raise ConfigError("This system cannot bind threads to processors: `threads` needs Linux.")
    import torch

    from trainer.host.gemm_library import choose_library
    from trainer.host.topology import cpu_list, read_topology
    from trainer.placement.rank_threads import propose_ranks, work_maker
    from trainer.placement.threads import candidates_of, choose_threads

    torch.set_flush_denormal(True)
    choose_library()
    topology = read_topology()
    print(f"This host has {topology.describe()}.")
    candidates = candidates_of(topology)
    make_work = work_maker(config, getattr(torch, args.dtype), len(candidates[0].cpus), {})
    choice = choose_threads(topology, make_work(), candidates)
    best = choice.best.candidate
    print("\n".join(choice.table()))
    print(
        f"The smallest that is at most 2 % slower than the fastest is {best.name}. For this host set in the "
        "inventory:\n"
        f"  fleet_cpus: {cpu_list(best.cpus)}\n  fleet_threads: {len(best.cpus)}"
    )
    if proposal := propose_ranks(topology, choice.best, make_work):
        print(proposal)
    return 0
