"""A stand-in for the trainer where no torch wheel is at hand: it keeps the trainer's files for a few seconds.

It trains nothing. What it proves is the unit around it: user, sandbox, environment, logs and outcome.
"""

import argparse
import json
import os
import time
from pathlib import Path

STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--run-file", "--data-dir", "--run-dir"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    run = json.loads(args.run_file.read_text())
    rank = run["hosts"].index(os.environ["NANOFLEET_HOST"])
    common = {"run_id": run["run_id"], "rank": rank, "num_iterations": STEPS}
    for step in range(1, STEPS + 1):
        beat = {**common, "host": os.environ["NANOFLEET_HOST"], "pid": os.getpid()}
        beat |= {"world_size": len(run["hosts"])}
        beat |= {"phase": "forward", "step": step, "loss": 6.0 - step, "val_bpb": None, "tok_per_s": 1.0}
        beat |= {"step_seconds": 1.0, "eta_seconds": float(STEPS - step), "time": time.time()}
        (args.run_dir / f"heartbeat-{rank}.json").write_text(json.dumps(beat))
        print(f"[rank {rank}] step {step}/{STEPS} on {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
        time.sleep(1)
    outcome = {**common, "outcome": "finished", "reason": "All steps done.", "step": STEPS, "first_loss": 5.0}
    outcome |= {"loss": 1.0, "val_bpb": None, "checkpoint": None, "sample": None}
    outcome |= {"seconds": STEPS, "tok_per_s": 1.0}
    (args.run_dir / "outcome.json").write_text(json.dumps({**outcome, "time": time.time()}))


if __name__ == "__main__":
    main()
