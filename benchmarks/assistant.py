"""Records a run, its fine-tuning and its answers for the page docs/assistant.md.

    python -m benchmarks.assistant --run artifacts/own/TOWER --chat artifacts/own-chat/TOWER --where HOSTS

--run is the folder of the base run and --chat that of its fine-tuned run, as fetch.yml copies them from the
coordinator. --where is a text that describes the hosts that trained. The newest checkpoint of --chat answers
each of QUESTIONS, with the most likely token at each position. Writes docs/recorded/assistant.json and
docs/assets/assistant.png; then `python -m scripts.docs_figures` fills the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDED, ROOT, origin, write

RECORD = RECORDED / "assistant.json"
PICTURE = ROOT / "docs" / "assets" / "assistant.png"
# The first half occurs in the conversations of the fine-tuning, the second half in other words or not at all.
QUESTIONS = (
    "What is the module json for?",
    "What is a generator?",
    "What does shutil.copyfile() do?",
    "When is FileExistsError raised?",
    "Tell me about the module json.",
    "What is a list?",
    "How do I read a file line by line?",
    "Who are you?",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.assistant", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the base run")
    parser.add_argument("--chat", type=Path, required=True, metavar="DIR", help="its fine-tuned run")
    parser.add_argument("--where", required=True, metavar="TEXT", help="the hosts that trained")
    args = parser.parse_args(argv)
    base, tuned = stage(args.run), stage(args.chat)
    found = {
        **origin("python -m benchmarks.assistant"),
        "where": args.where,
        "base": base,
        "chat": tuned,
        "answers": [{"question": each, "answer": answer(args.chat, each)} for each in QUESTIONS],
    }
    write(RECORD, found)
    draw(PICTURE, entries(args.run), base["total_batch_size"])
    print(f"{RECORD.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)} written")
    return 0


def entries(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts; of a step that was trained several times, only the last line."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return list({(line.get("step"), "loss" in line): line for line in lines}.values())


def stage(run_dir: Path) -> dict[str, Any]:
    """The figures of a run, such as its depth, its hours of training and its validation in bits per byte."""
    config = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["config"]
    outcome = json.loads((run_dir / "outcome.json").read_text(encoding="utf-8"))
    lines = entries(run_dir)
    steps = [line for line in lines if "loss" in line]
    evaluated = [[line["step"], round(line["val_bpb"], 3)] for line in lines if "val_bpb" in line]
    return {
        **{name: config[name] for name in ("depth", "sequence_len", "total_batch_size", "sync")},
        "steps": steps[-1]["step"],
        "hours": round(sum(line["step_seconds"] for line in steps) / 3600, 2),
        "tok_per_s": round(sorted(line["tok_per_s"] for line in steps)[len(steps) // 2]),
        "first_loss": round(steps[0]["loss"], 2),
        "loss": round(steps[-1]["smooth_loss"], 2),
        "val_bpb": evaluated,
        "sample": outcome.get("sample") or "",
    }


def answer(run_dir: Path, question: str) -> str:
    command = [sys.executable, "-m", "trainer", "chat", "--run-dir", str(run_dir), "--prompt", question]
    command += ["--temperature", "0", "--max-tokens", "120", "--dtype", "float32"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def draw(path: Path, lines: list[dict[str, Any]], tokens: int) -> None:
    """Plot the training loss over tokens and the validation in bits per byte over hours, to the file `path`.

    lines: the result of `entries`. tokens: the number of tokens in a step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line for line in lines if "loss" in line]
    hours, clock = 0.0, {}
    for line in steps:
        hours += line["step_seconds"] / 3600
        clock[line["step"]] = hours
    evaluated = [line for line in lines if "val_bpb" in line]
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, bits = figure.subplots(1, 2)
    loss.plot([line["step"] * tokens / 1e6 for line in steps], [line["loss"] for line in steps], color="0.8")
    loss.plot([line["step"] * tokens / 1e6 for line in steps], [line["smooth_loss"] for line in steps])
    loss.set(xlabel="million tokens", ylabel="training loss, nats per token; smoothed in blue")
    bits.plot([clock[line["step"]] for line in evaluated], [line["val_bpb"] for line in evaluated], "o-")
    bits.set(xlabel="hours of training", ylabel="validation, bits per byte")
    FigureCanvasAgg(figure).print_png(str(path))


def block(record: dict[str, Any]) -> str:
    """The part of docs/assistant.md with the figures, samples and answers of a record."""
    base, chat = record["base"], record["chat"]
    curve = ", ".join(f"{bits:.3f} at step {step:,}" for step, bits in base["val_bpb"])
    rows = "\n".join(
        f"**{each['question']}**\n\n> {' '.join(each['answer'].split()) or '(nothing)'}\n"
        for each in record["answers"]
    )
    tokens = base["total_batch_size"]
    return (
        f"**Measured** ({record['where']}; `{record['command']}`, commit `{record['commit']}`, "
        f"{record['date']}): depth {base['depth']}, {base['steps']:,} steps of {tokens:,} tokens "
        f"({base['steps'] * tokens / 1e6:.1f} million) in {base['hours']:.1f} hours of training, median "
        f"{base['tok_per_s']:,} tokens/s. The loss fell from {base['first_loss']} to {base['loss']}. "
        f"Validation in bits per byte: {curve}. Fine-tuning took {chat['steps']:,} steps and "
        f"{chat['hours'] * 60:.0f} minutes.\n\n"
        "![Training loss over tokens, and bits per byte over hours](assets/assistant.png)\n\n"
        f"A sample of the base model:\n\n```text\n{base['sample'].strip()}\n```\n\n"
        f"Questions, and the answers of the fine-tuned model:\n\n{rows}"
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
