"""Write the measured figures into the pages, from the files in docs/recorded.

    make bench ARGS="--record"       measures, and writes docs/recorded/bench.json
    make replay ARGS="--record"      measures, and writes docs/recorded/replay.json
    python -m benchmarks.compression ... --record     writes docs/recorded/compression.json
    python -m benchmarks.predictions --record         writes docs/recorded/predictions.json
    python -m benchmarks.memory ... --record          writes docs/recorded/memory.json
    python -m benchmarks.scaling ... --record         writes docs/recorded/scaling.json
    python -m benchmarks.elastic ... --record         writes docs/recorded/elastic.json
    python -m benchmarks.failover ... --record        writes docs/recorded/failover.json
    python -m benchmarks.elastic_cost ... --record    writes docs/recorded/elastic-cost.json
    python -m benchmarks.elastic_soak ... --record    writes docs/recorded/soak.json
    python -m benchmarks.assistant ...                writes docs/recorded/assistant.json
    python -m benchmarks.gpu --record FILE            writes docs/recorded/gpu.json
    python -m scripts.docs_figures   writes the figures into the pages (--check writes nothing)

Each phrase in PHRASES occurs once in its page; the script replaces the figures in the phrase. The script also
replaces what stands between each of these marks and `<!-- end -->`:

    <!-- figures -->       the table of all benchmark cases
    <!-- replay -->        docs/how-to/replay.md: the comparison with a training that was set up by hand
    <!-- compression -->   docs/explanation/sync-modes.md: the compressions of sync=local
    <!-- predictions -->   docs/explanation/placement.md: predicted and measured steps
    <!-- memory -->        the same page: estimated and measured memory
    <!-- scaling -->       docs/explanation/scaling.md: 2 to 32 ranks
    <!-- elastic -->       docs/explanation/elastic.md: hosts that leave and join
    <!-- failover -->      the same page: the loss of the coordinator
    <!-- soak -->          the same page: the result of a soak
    <!-- elastic-cost -->  the same page: what elastic=true costs while nothing happens
    <!-- assistant -->     docs/assistant.md: the figures and answers of the assistant's runs
    <!-- gpu -->           docs/how-to/gpu-host.md: steps on one GPU
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import (
    assistant,
    elastic,
    elastic_cost,
    elastic_soak,
    failover,
    gpu,
    memory,
    predictions,
    replay,
    scaling,
)
from scripts.generated import ROOT, write
from trainer.formatting import markdown_table

RECORD = ROOT / "docs" / "recorded" / "bench.json"
REPLAY_PAGE = ROOT / "docs" / "how-to" / "replay.md"
COMPRESSIONS = RECORD.with_name("compression.json")
MODES_PAGE = ROOT / "docs" / "explanation" / "sync-modes.md"
SCALING_PAGE = MODES_PAGE.with_name("scaling.md")
PLACEMENT_PAGE = MODES_PAGE.with_name("placement.md")
GPU_PAGE = ROOT / "docs" / "how-to" / "gpu-host.md"
ASSISTANT_PAGE = ROOT / "docs" / "assistant.md"
ELASTIC_PAGE = MODES_PAGE.with_name("elastic.md")
STEPS = 5000
ASSISTANT_STEPS = 6600  # of 4,096 tokens: as many tokens as the assistant's run has
PHRASES = {
    "README.md": (
        "float32) in {exact.step_seconds:.1f} s a step: {exact.factor:.1f} times as fast as one host",
        "and {exact.over_ddp:.1f} times as fast as plain DDP",
        "5,000 such steps take about {exact.hours:.0f} hours.",
        "(`sync=fast`) a step takes {bfloat16.step_seconds:.1f} s,",
        "{bfloat16.over_ddp:.1f} times as fast as plain DDP in bfloat16",
        "and 5,000 take about {bfloat16.hours:.0f} hours.",
    ),
    "docs/faq.md": (
        "take about {exact.hours:.0f} hours with `exact` in float32",
        "and {bfloat16.hours:.0f} hours with `fast` in bfloat16",
        "sends {dense.payload_mb:.0f} MB in `dense`, {exact.payload_mb:.0f} MB in `exact`,",
        "{fast.payload_mb:.0f} MB in `fast` and {local.payload_mb} MB in `local`",
        "at 4,096 tokens gave {dense.factor:.2f} times one host, `exact` {exact.factor:.2f} times,",
    ),
    "docs/how-to/slow-link.md": (
        "sends {dense.payload_mb:.0f} MB per rank:",
        "the same sums with {exact.payload_mb:.0f} MB,",
        "the same sums, sent in bfloat16: {fast.payload_mb:.0f} MB.",
        "with 4,096 tokens per rank: {local.step_seconds:.1f} s a step",
        "one host alone takes {local.baseline_seconds:.1f} s for half the tokens,",
        "so {local.factor:.2f} times the tokens per second",
    ),
    "docs/assistant.md": (
        "takes about {exact.assistant_hours:.0f} hours with `sync=exact` in float32",
        "and {bfloat16.assistant_hours:.0f} hours with `sync=fast` in bfloat16",
        "measured {exact.step_seconds:.1f} and {bfloat16.step_seconds:.1f} s a step",
    ),
    "docs/performance.md": (
        "one `make bench`, recorded on {date} (commit `{commit}`)",
        "a step: {one_float32.step_seconds:.2f} s ({one_float32.tok_per_s:.0f} tok/s) in float32,",
        "{one_bfloat16.step_seconds:.2f} s ({one_bfloat16.tok_per_s:.0f} tok/s) in bfloat16,",
        "In float32 a step is at {one_float32.percent:.0f} % of the roofline limit",
        "in bfloat16 at {one_bfloat16.percent:.0f} %.",
        "in bfloat16, {one_float32.peak_gb} GB of memory at most.",
        "5,000 steps of 4,096 tokens take {exact.hours:.1f} hours on the two hosts,",
        "{dense.hours:.1f} hours with `dense` and {exact.baseline_hours:.1f} hours on one host;",
        "with `fast` in bfloat16 {bfloat16.hours:.1f} hours.",
    ),
}


def case(figures: dict[str, Any]) -> SimpleNamespace:
    """The figures of a benchmark case as attributes.

    Added are `hours`, the hours of STEPS steps, `baseline_hours`, those of the single-host baseline,
    `assistant_hours`, those of ASSISTANT_STEPS steps, and `percent`, the share of the roofline limit in
    percent, for one process only.
    """
    return SimpleNamespace(
        **figures,
        hours=figures["step_seconds"] * STEPS / 3600,
        baseline_hours=figures.get("baseline_seconds", 0.0) * STEPS / 3600,
        assistant_hours=figures["step_seconds"] * ASSISTANT_STEPS / 3600,
        percent=100 * figures.get("share_of_limit", 0.0),
    )


def values(record: dict[str, Any]) -> dict[str, Any]:
    """The values for the placeholders in PHRASES, by name.

    record: the content of bench.json. Raises KeyError if a case is missing in it.
    """
    cases = {(row["sync"], row["dtype"], row["tokens"]): case(row) for row in record["two_hosts"]}
    one = {f"one_{row['dtype']}": case(row) for row in record["one_process"]}
    named = {name: cases[name, "float32", 4096] for name in ("dense", "exact", "fast")}
    return {
        **{key: record[key] for key in ("date", "commit")},
        **named,
        **one,
        "bfloat16": cases["fast", "bfloat16", 4096],
        "local": cases["local", "float32", 8192],
    }


def case_table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of benchmark cases. rows: the entry `two_hosts` of bench.json."""
    head = ("sync, format", "tokens a step", "step, s", "single-host baseline, s")
    lines = []
    for row in rows:
        link = "" if row["link_mbit"] == 1000 else f", {row['link_mbit']} Mbit/s"
        link += ", the second host with a third of a core" if row["slow_second"] else ""
        other = row["baseline_tokens"] != row["tokens"]
        cells = (
            f"`{row['sync']}`, {row['dtype']}{link}",
            f"{row['tokens']:,}",
            f"{row['step_seconds']:.2f}",
            f"{row['baseline_seconds']:.2f}" + (f" ({row['baseline_tokens']:,} tokens)" if other else ""),
            f"{row['factor']:.2f}x" + (" by tokens" if other else ""),
            f"{row['over_ddp']:.2f}x" if row["over_ddp"] else "",
            f"{row['payload_mb']:g}",
        )
        lines.append(cells)
    return markdown_table([(*head, "factor", "over plain DDP", "MB sent per rank"), *lines], aligned=False)


def compression_table(record: dict[str, Any]) -> str:
    """The table of the compressions as Markdown, after a sentence on model, steps and machine.

    record: the content of docs/recorded/compression.json, which benchmarks.compression writes.
    """
    where = f"{record['machine']}, `{record['command']}`, commit `{record['commit']}`, {record['date']}"
    head = (
        "ranks",
        "run",
        "final validation loss, nats",
        "to `dense`",
        "to `dense`, mean of the second half",
    )
    title = (
        f"Depth {record['depth']}, {record['steps']:,} steps of 1,024 tokens, "
        f"all ranks on one machine ({where}):"
    )
    rows = []
    for case in record["cases"]:
        name = "`dense`" if case["run"] == "dense" else f"`local`, {case['run']}"
        away = [
            f"{case[key]:+.3f}" if case["run"] != "dense" else "" for key in ("from_dense", "from_dense_mean")
        ]
        cells = (str(case["ranks"]), name, f"{case['val_loss']:.3f}", *away, f"{case['bytes_per_step']:,}")
        rows.append(cells)
    return f"{title}\n\n{markdown_table([(*head, 'bytes a step'), *rows], aligned=False)}"


def scaling_block(record: dict[str, Any]) -> str:
    """The tables of a record of benchmarks.scaling, each after a sentence on its hosts and conditions."""
    where = f"`{record['command']}`, commit `{record['commit']}`, {record['date']}"
    model = f"depth {record['depth']} ({record['parameters']:,} parameters) in float32"
    rows, processor = f"{record['rows']} rows of 1,024 tokens", record["machine"]
    computed, measured = scaling.tables(record)
    return (
        f"**Computed** for {model}, {rows} per rank and step, hosts with one core of {processor} each and a "
        f"link of {record['link_mb_s']} MB/s ({where}). *Over one host*: the same tokens on one such host "
        f"take so many times as long. `local` has 8 bits and 30 steps a round.\n\n{computed}\n\n"
        f"**Measured** with `exact` over loopback on one machine, whose {record['cores']} cores all ranks "
        f"share; the prediction is from speeds that the ranks measured at the same time:\n\n{measured}"
    )


def filled(page: str, phrase: str, shown: dict[str, Any]) -> str:
    """The text `page` with new figures in one phrase.

    phrase: a format string, whose placeholders stand for the figures. shown: {name: value} for the
    placeholders. Raises ValueError unless the phrase, with any figures, occurs exactly once in `page`.
    """
    words = re.split(r"\{[^}]*\}", phrase)
    pattern = r"([\w.-]+)".join(re.escape(part).replace(r"\ ", r"\s+") for part in words)
    found = list(re.finditer(pattern, page))
    if len(found) != 1:
        raise ValueError(f"{phrase!r} occurs {len(found)} times; scripts/docs_figures.py expects it once.")
    figures = [figure.format(**shown) for figure in re.findall(r"\{[^}]*\}", phrase)]
    for group in range(len(figures), 0, -1):
        start, end = found[0].span(group)
        page = page[:start] + figures[group - 1] + page[end:]
    return page


def marked(page: str, mark: str, block: str) -> str:
    """The text `page` with `block` between `<!-- mark -->` and `<!-- end -->`.

    A page without `<!-- mark -->` is returned unchanged. Raises ValueError if only `<!-- end -->` is missing:
    the rest of the page would be lost.
    """
    before, begin, rest = page.partition(f"<!-- {mark} -->\n")
    if not begin:
        return page
    _old, end, after = rest.partition("\n<!-- end -->")
    if not end:
        raise ValueError(f"<!-- {mark} --> has no <!-- end --> after it")
    return before + begin + block + end + after


def pages() -> dict[Path, str]:
    """{path: text} of each page with measured figures, with the recorded figures in the text."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    shown, texts = values(record), {}
    for name, phrases in PHRASES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for phrase in phrases:
            text = filled(text, phrase, shown)
        texts[ROOT / name] = marked(text, "figures", case_table(record["two_hosts"]))
    texts[REPLAY_PAGE] = marked(REPLAY_PAGE.read_text(encoding="utf-8"), "replay", replay_block())
    modes = compression_table(json.loads(COMPRESSIONS.read_text(encoding="utf-8")))
    texts[MODES_PAGE] = marked(MODES_PAGE.read_text(encoding="utf-8"), "compression", modes)
    ranks = scaling_block(json.loads(scaling.RECORD.read_text(encoding="utf-8")))
    texts[SCALING_PAGE] = marked(SCALING_PAGE.read_text(encoding="utf-8"), "scaling", ranks)
    texts[ELASTIC_PAGE] = ELASTIC_PAGE.read_text(encoding="utf-8")
    for benchmark in (elastic, failover, elastic_soak, elastic_cost):
        found = benchmark.block(json.loads(benchmark.RECORD.read_text(encoding="utf-8")))
        texts[ELASTIC_PAGE] = marked(texts[ELASTIC_PAGE], benchmark.MARK, found)
    predicted = predictions.block(json.loads(predictions.RECORD.read_text(encoding="utf-8")))
    needed = memory.block(json.loads(memory.RECORD.read_text(encoding="utf-8")))
    texts[PLACEMENT_PAGE] = marked(PLACEMENT_PAGE.read_text(encoding="utf-8"), "predictions", predicted)
    texts[PLACEMENT_PAGE] = marked(texts[PLACEMENT_PAGE], "memory", needed)
    run = assistant.block(json.loads(assistant.RECORD.read_text(encoding="utf-8")))
    texts[ASSISTANT_PAGE] = marked(texts[ASSISTANT_PAGE], "assistant", run)
    one_gpu = gpu.block(json.loads(gpu.RECORD.read_text(encoding="utf-8")))
    texts[GPU_PAGE] = marked(GPU_PAGE.read_text(encoding="utf-8"), "gpu", one_gpu)
    return texts


def replay_block() -> str:
    """The recorded comparison with a training that was set up by hand, as Markdown.

    If replay.json is missing, the figures of that training, and a sentence that there is no comparison yet.
    """
    by_hand = json.loads(replay.BY_HAND.read_text(encoding="utf-8"))
    if not replay.REPLAY.exists():
        two, one = by_hand["two_hosts"], by_hand["one_host"]
        return (
            f"By hand, as recorded: {by_hand['hardware']}. At depth {by_hand['depth']} and "
            f"{by_hand['tokens']:,} tokens a step the two hosts reached {two['tok_per_s']} tokens/s, "
            f"{two['step_seconds']} s a step; one of them alone {one['tok_per_s']} tokens/s.\n\n"
            "No measurement of plain DDP and nanofleet is recorded yet, so there is no table here."
        )
    measured = json.loads(replay.REPLAY.read_text(encoding="utf-8"))
    source = f"`{measured['command']}`, recorded on {measured['date']} (commit `{measured['commit']}`)"
    return (
        f"{replay.table(by_hand, measured)}\n\n"
        f"The lines below those by hand are from one run of {source}, at depth {measured['depth']} "
        f"({measured['parameters']:,} parameters) and {measured['tokens']:,} tokens a step."
    )


def main(argv: list[str] | None = None) -> int:
    return write("docs_figures", __doc__ or "", pages(), argv)


if __name__ == "__main__":
    sys.exit(main())
