"""What the tests of the console share: a drawn screen, events as Ansible sends them, reports of a run."""

import io

from rich.console import Console


def drawn(part: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def event(kind: str, **data: object) -> dict[str, object]:
    return {"event": kind, "pid": 7, "event_data": data}


def state(rank: int, step: int | None = 12, **more: object) -> dict[str, object]:
    """A report as the run_state module gives it."""
    beat = {
        "run_id": "d4-1a2b3c4d",
        "rank": rank,
        "phase": "backward",
        "step": step,
        "num_iterations": 100,
        "loss": 5.5,
        "val_bpb": None,
        "tok_per_s": 2345.6,
        "step_seconds": 1.75,
        "eta_seconds": 154.0,
        "age": 0.4,
    }
    base: dict[str, object] = {
        "found": True,
        "run_id": "d4-1a2b3c4d",
        "run_dir": "/var/lib/nanofleet/runs/d4-1a2b3c4d",
        "ended": False,
        "between": False,
        "failed_unit": False,
        "rebooted": None,
        "unit": {"active_state": "active", "sub_state": "running"},
        "time": 1000.0,
        "runs": [],
        "active_units": [],
        "past_attempts": [],
        "checkpoint_time": None,
        "heartbeats": [beat] if step is not None else [],
        "metrics": None,
        "evaluation": None,
        "outcome": None,
        "error": [],
        "run_file": {
            "hosts": ["a", "b"],
            "config": {"depth": 4, "total_batch_size": 4096, "sequence_len": 256},
        },
        "checkpoint": None,
        "stop_requested": False,
    }
    return base | more


OUTCOME = {
    "outcome": "finished",
    "reason": "All 100 steps were taken.",
    "step": 100,
    "num_iterations": 100,
    "loss": 4.25,
    "val_bpb": 2.125,
    "checkpoint": "checkpoints/step_000100",
    "sample": "def [main](self):",
}
