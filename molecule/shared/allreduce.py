"""A real all-reduce over Gloo between lab hosts, with the controller's torch inside the hosts' own networks.

    python molecule/shared/allreduce.py MASTER_ADDRESS CONTAINER=INTERFACE CONTAINER=INTERFACE

Hosts of a light scenario have no torch. So each rank is a torchrun of this machine that has entered the
container's network and host name, with copies of its /etc/hosts and /etc/nsswitch.conf in their places:
addresses, routes, ports and firewall are the host's. Prints one line a rank; ends with 1 if the sum is wrong
or the ranks do not meet. Needs root and podman.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

SEEN = ("/etc/hosts", "/etc/nsswitch.conf")


def rank() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    listeners = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3] for line in listeners.splitlines() if f"pid={os.getpid()}," in line]
    print(f"rank {dist.get_rank()}: sum {tensor.mean().item():g}, listening on {' '.join(own)}", flush=True)
    dist.barrier()


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], capture_output=True, text=True, check=True).stdout


def start(
    container: str, interface: str, node_rank: int, nodes: int, master: str, folder: Path
) -> subprocess.Popen[str]:
    pid = podman("inspect", "--format", "{{.State.Pid}}", container).strip()
    binds = []
    for path in SEEN:
        copy = folder / f"{container}-{Path(path).name}"
        copy.write_text(podman("exec", container, "cat", path))
        binds.append(f"mount --bind {copy} {path}")
    torchrun = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 "
        f"--node-rank={node_rank} --master-addr={master} --master-port=29500 --max-restarts=0 "
        f"--rdzv-conf=timeout=20 {Path(__file__).resolve()} --rank"
    )
    return subprocess.Popen(
        ["nsenter", "-t", pid, "-n", "-u", "unshare", "-m", "sh", "-c", " && ".join([*binds, torchrun])],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def main(argv: list[str]) -> int:
    if argv == ["--rank"]:
        rank()
        return 0
    master, *hosts = argv
    pairs = [host.split("=") for host in hosts]
    output = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(*pair, i, len(pairs), master, Path(folder)) for i, pair in enumerate(pairs)]
        for process in ranks:
            try:
                output.append(process.communicate(timeout=60)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                output.append(process.communicate()[0] + "\nstill waiting after 60 s")
    wanted = f"sum {sum(range(1, len(pairs) + 1))},"
    met = all(process.returncode == 0 and wanted in text for process, text in zip(ranks, output, strict=True))
    for text in output:
        lines = text.splitlines()
        print("\n".join([line for line in lines if line.startswith("rank ")] if met else lines[-20:]))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
