"""`python -m trainer export` and `import`: to upstream nanochat and back. torch is imported only to do it.

python -m trainer export --checkpoint runs/mine/checkpoints/step_000100 --to nanochat --out nanochat
python -m trainer import --from-nanochat ~/.cache/nanochat --data-dir data
python -m trainer import --from-nanochat ~/.cache/nanochat --model-tag d20 --run-dir runs/d20
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from trainer.config import ConfigError, RunConfig
from trainer.data.tokenizer import Tokenizer
from trainer.interchange.layout import find_pair, find_tokenizer

SHAPE_KNOBS = ("depth", "aspect_ratio", "head_dim", "n_kv_head", "sequence_len", "window_pattern")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of `export`."""
    parser.description = "Write a checkpoint and its tokenizer as upstream's loader reads them."
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a step_NNNNNN directory"
    )
    parser.add_argument("--to", choices=["nanochat"], required=True, help="whose files to write")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a nanochat base directory, new or in use"
    )
    parser.add_argument(
        "--model-tag", default="", metavar="TAG", help="folder under base_checkpoints (default: d<depth>)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is there and says something else"
    )


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options of `import`."""
    parser.description = "Take over a tokenizer, shards or a checkpoint of upstream's."
    parser.add_argument(
        "--from-nanochat",
        type=Path,
        required=True,
        metavar="PATH",
        help="a nanochat base directory, a folder of its checkpoints, or one model_NNNNNN.pt",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="bring the tokenizer and the shards, as prepare would"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="import a checkpoint, for a run that resumes from it"
    )
    parser.add_argument(
        "--restart", action="store_true", help="count from step 0: a new run, of any knobs, on these weights"
    )
    parser.add_argument("--model-tag", default="", metavar="TAG", help="which model (default: the deepest)")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint of it (default: the last)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="its tokenizer.pkl, if it lies elsewhere"
    )


def run_export(args: argparse.Namespace) -> int:
    """Do what the options ask. Raises ConfigError or DataError."""
    from trainer.interchange.export import export

    try:
        done = export(args.checkpoint, args.out, args.model_tag, args.overwrite)
    except OSError as error:
        raise ConfigError(_disk(error, args.out)) from None
    for verb, paths in (("wrote", done.written), ("left as it is:", done.unchanged)):
        for path in paths:
            print(f"export: {verb} {path} ({path.stat().st_size:,} bytes)")
    if done.note:
        print(f"export: {done.note}")
    base = shlex.quote(str(args.out.resolve()))
    print(
        f"export: in nanochat's folder: NANOCHAT_BASE_DIR={base} python -m scripts.base_eval "
        f"--model-tag {done.pair.folder.name} --step {done.pair.step} --eval sample"
    )
    print("export: the optimizer's state stays here: nanochat can use and fine-tune the model, not resume it")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Do what the options ask. Raises ConfigError or DataError."""
    if not (args.data_dir or args.run_dir):
        raise ConfigError(
            "Say where to: --data-dir DIR for tokenizer and shards, --run-dir DIR for a checkpoint."
        )
    try:
        tokenizer = _read_tokenizer(args)
        if args.data_dir:
            _import_data(args, tokenizer)
        if args.run_dir:
            _import_checkpoint(args, tokenizer)
    except OSError as error:
        raise ConfigError(_disk(error, args.run_dir or args.data_dir)) from None
    return 0


def _read_tokenizer(args: argparse.Namespace) -> Tokenizer:
    from trainer.interchange import pickled_tokenizer

    path = args.tokenizer or find_tokenizer(args.from_nanochat)
    tokenizer = pickled_tokenizer.read(path)
    print(f"import: the tokenizer {path} has {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _import_data(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    from trainer.interchange.data import adopt_shards, adopt_tokenizer, has_shards

    if not has_shards(args.from_nanochat):
        path = adopt_tokenizer(tokenizer, args.data_dir)
        print(f"import: the tokenizer is {path}; there are no shards in {args.from_nanochat}")
        return
    done = adopt_shards(args.from_nanochat, tokenizer, args.data_dir)
    print(
        f"import: {args.data_dir} has the tokenizer and {done.shards} shards, {done.documents:,} documents "
        f"in {done.text_bytes / 1e6:,.2f} MB; the last shard is for validation"
        + (" (nothing has changed)" if done.reused == "all" else "")
    )


def _import_checkpoint(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    from trainer.interchange.adopt import adopt_checkpoint

    pair = find_pair(args.from_nanochat, args.model_tag, args.step)
    done = adopt_checkpoint(pair, tokenizer, args.run_dir, args.restart)
    print(f"import: {pair.model} is {done.path}" + (" already" if done.unchanged else ""))
    if done.note:
        print(f"import: {done.note}")
    print("import: the optimizer's state is not taken over: its averages start anew")
    last = done.config.num_iterations
    if last and pair.step >= last and not args.restart:
        print(f"import: its run of {last:,} steps is done: to train it further, import it with --restart")
    else:
        names = SHAPE_KNOBS if args.restart else RunConfig.field_names()
        settings = " ".join(_flags(done.config, names))
        print(
            "import: to go on, " + ("with any other knobs:" if args.restart else "with exactly these knobs:")
        )
        data = args.data_dir or "DATA"
        print(f"  python -m trainer train --data-dir {data} --run-dir {args.run_dir} {settings}")
    print("import: to see what it says:")
    print(f'  python -m trainer sample --checkpoint {done.path} --prompt "The "')


def _flags(config: RunConfig, names: tuple[str, ...]) -> list[str]:
    """Depth, horizon, and the knobs among `names` that are not at their defaults, as `train` takes them."""
    default = RunConfig()
    always = {"depth", "num_iterations"}
    chosen = [name for name in names if name in always or getattr(config, name) != getattr(default, name)]
    return [f"--{name.replace('_', '-')} {getattr(config, name)}" for name in chosen]


def _disk(error: OSError, where: Path) -> str:
    return f"Cannot read or write {error.filename or where}: {error.strerror or error}."
