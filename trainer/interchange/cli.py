"""`python -m trainer export` and `import`: checkpoints, tokenizer and shards to and from nanochat.

python -m trainer export --checkpoint runs/mine/checkpoints/step_000100 --to nanochat --out nanochat
python -m trainer import --from-nanochat ~/.cache/nanochat --data-dir data
python -m trainer import --from-nanochat ~/.cache/nanochat --model-tag d20 --run-dir runs/d20
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import ConfigError, RunConfig
from trainer.interchange.layout import find_pair, find_tokenizer
from trainer.stages import BASE, SFT

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer

SHAPE_SETTINGS = ("depth", "aspect_ratio", "head_dim", "n_kv_head", "sequence_len", "window_pattern")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `export` to `parser`."""
    parser.description = "Write a checkpoint and its tokenizer in the format of nanochat."
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a step_NNNNNN directory"
    )
    parser.add_argument("--to", choices=["nanochat"], required=True, help="the format")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a nanochat base directory, new or in use"
    )
    parser.add_argument(
        "--model-tag", default="", metavar="TAG", help="name of the model's folder (default: d<depth>)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files with other content")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `import` to `parser`."""
    parser.description = "Import a tokenizer, shards or a checkpoint of nanochat."
    parser.add_argument(
        "--from-nanochat",
        type=Path,
        required=True,
        metavar="PATH",
        help="a nanochat base directory, a folder of its checkpoints, or one model_NNNNNN.pt",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="import the tokenizer and the shards to this folder"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="import a checkpoint, for a run that resumes from it"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="count from step 0: a new run, with any settings, that starts from these weights",
    )
    parser.add_argument("--model-tag", default="", metavar="TAG", help="which model (default: the deepest)")
    parser.add_argument(
        "--stage",
        choices=[BASE, SFT],
        default=BASE,
        help="of a base directory, take a base model or a fine-tuned one (%(default)s)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the last)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="its tokenizer.pkl, if it is in another folder"
    )


def run_export(args: argparse.Namespace) -> int:
    """Run the subcommand `export`; returns the exit code 0. args: the parsed options.

    Raises ConfigError or DataError if the checkpoint cannot be read or its files cannot be written.
    """
    from trainer.interchange.export import export

    try:
        done = export(args.checkpoint, args.out, args.model_tag, args.overwrite)
    except OSError as error:
        raise ConfigError(_disk(error, args.out)) from None
    for action, paths in (("wrote", done.written), ("unchanged:", done.unchanged)):
        for path in paths:
            print(f"export: {action} {path} ({path.stat().st_size:,} bytes)")
    if done.note:
        print(f"export: {done.note}")
    base = shlex.quote(str(args.out.resolve()))
    script, option = ("chat_cli", "-i sft") if done.pair.stage == SFT else ("base_eval", "--eval sample")
    print(
        f"export: in nanochat's folder: NANOCHAT_BASE_DIR={base} python -m scripts.{script} "
        f"--model-tag {done.pair.folder.name} --step {done.pair.step} {option}"
    )
    print("export: without the optimizer state: nanochat can use and fine-tune the model, not resume it")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Run the subcommand `import`; returns the exit code 0. args: the parsed options.

    Raises ConfigError or DataError if nanochat's files cannot be imported or the target has other files.
    """
    if not (args.data_dir or args.run_dir):
        raise ConfigError(
            "There is no target: give --data-dir DIR for tokenizer and shards, or --run-dir DIR for a "
            "checkpoint."
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
        print(
            f"import: wrote the tokenizer to {path}. {args.from_nanochat} has no shards; to make some with "
            f"this tokenizer: python -m trainer prepare --source FOLDER --out {_quoted(args.data_dir)} "
            f"--tokenizer {_quoted(path.parent)}"
        )
        return
    done = adopt_shards(args.from_nanochat, tokenizer, args.data_dir)
    print(
        f"import: {args.data_dir} has the tokenizer and {done.shards} shards, {done.documents:,} documents "
        f"in {done.text_bytes / 1e6:,.2f} MB; the last shard is for validation"
        + (" (nothing has changed)" if done.reused == "all" else "")
    )


def _import_checkpoint(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    from trainer.interchange.adopt import adopt_checkpoint

    pair = find_pair(args.from_nanochat, args.model_tag, args.step, args.stage)
    done = adopt_checkpoint(pair, tokenizer, args.run_dir, args.restart)
    if done.unchanged:
        print(f"import: {done.path} has the content of {pair.model} already; unchanged")
    else:
        print(f"import: wrote {pair.model} to {done.path}")
    if done.note:
        print(f"import: {done.note}")
    print("import: the optimizer state is not imported: its moments start at zero")
    if done.config.stage == SFT:
        print("import: to fine-tune it further, on the conversations in CHATS (a new run):")
        print(
            f"  python -m trainer train --stage {SFT} --from-checkpoint {_quoted(done.path)} "
            "--data-dir CHATS --run-dir NEW"
        )
    elif not args.restart and pair.step >= (last := _steps_of(done.config, tokenizer)):
        print(
            f"import: the imported run has completed its {last:,} steps. To train the model further, "
            "type the same import with --restart and another --run-dir"
        )
    else:
        names = SHAPE_SETTINGS if args.restart else RunConfig.field_names()
        settings = " ".join(_flags(done.config, names))
        print(
            "import: to train it, "
            + ("with these settings and any others:" if args.restart else "with exactly these settings:")
        )
        data = _quoted(args.data_dir) if args.data_dir else "DATA"
        print(f"  python -m trainer train --data-dir {data} --run-dir {_quoted(args.run_dir)} {settings}")
    print("import: to generate text:")
    print(f'  python -m trainer sample --checkpoint {_quoted(done.path)} --prompt "The "')


def _steps_of(config: RunConfig, tokenizer: Tokenizer) -> int:
    """The number of steps of a base run, also if its settings give target_flops or a token ratio instead."""
    from trainer.run_plan import make_plan

    return make_plan(config, tokenizer.vocab_size, 1).num_iterations


def _quoted(path: Path) -> str:
    """A path, quoted for a shell command."""
    return shlex.quote(str(path))


def _flags(config: RunConfig, names: tuple[str, ...]) -> list[str]:
    """The options of `train` for the settings `names`, as texts such as "--depth 8".

    Settings with their default values are left out, except depth and num_iterations.
    """
    default = RunConfig()
    always = {"depth", "num_iterations"}
    chosen = [name for name in names if name in always or getattr(config, name) != getattr(default, name)]
    return [f"--{name.replace('_', '-')} {getattr(config, name)}" for name in chosen]


def _disk(error: OSError, where: Path) -> str:
    return f"Cannot read or write {error.filename or where}: {error.strerror or error}."
