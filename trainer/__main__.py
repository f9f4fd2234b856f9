"""The subcommands of the trainer; each has its own --help.

python -m trainer prepare --source FOLDER --out data
python -m trainer conversations --conversations chats.jsonl --data-dir data --out chats
python -m trainer train --data-dir data --run-dir runs/mine --depth 4 --num-iterations 100
python -m trainer bench --depth 4 8
python -m trainer plan --data-dir data --depth 4              # under torchrun on every host, as for train
python -m trainer threads --depth 8
python -m trainer track --run-dir runs/mine --tracker-uri http://tower:5000
python -m trainer again --run-dir runs/mine
python -m trainer sample --checkpoint runs/mine/checkpoints/step_000100 --prompt "The "
python -m trainer eval --checkpoint runs/mine/checkpoints/step_000100 --data-dir data
python -m trainer chat --run-dir runs/mine
python -m trainer serve --run-dir runs/mine --follow --port 8000
python -m trainer export --checkpoint runs/mine/checkpoints/step_000100 --to nanochat --out nanochat
python -m trainer import --from-nanochat nanochat --run-dir runs/theirs
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.bench import cli as bench
from trainer.chat.options import add_chat_arguments, add_serve_arguments
from trainer.config import ConfigError, RunConfig, RunFile, parse_shares
from trainer.data import DataError, chat_cli, prepare
from trainer.eval import cli as evaluation
from trainer.health import restart_policy
from trainer.host.logger import flush_streams
from trainer.interchange import cli as interchange
from trainer.options import add_config_arguments, number_from_zero
from trainer.placement import threads_cli
from trainer.presets import PRESETS, PresetError, apply_preset
from trainer.stages import SFT, sft_settings
from trainer.tracking import sender

if TYPE_CHECKING:
    from trainer.health.attempt import Attempt
    from trainer.host.logger import RunLogger


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `python -m trainer` with all subcommands. Does not import torch."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Train nanochat models data-parallel."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, allow_abbrev=False, help=command.help))
    return parser


def add_train_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `train` to `command`."""
    command.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="directory for the files of the run"
    )
    command.add_argument(
        "--tracker-uri", default="", metavar="URI", help="address of MLflow (default: MLFLOW_TRACKING_URI)"
    )
    command.add_argument("--json", action="store_true", help="log one JSON object per line")
    add_run_arguments(command)


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options that define a run, such as --run-file, and an option for each setting."""
    command.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="the output of prepare")
    command.add_argument(
        "--run-file", type=Path, metavar="FILE", help="run.json, instead of the settings below"
    )
    command.add_argument(
        "--run-id", metavar="NAME", help="name of the run (default: from depth and configuration)"
    )
    command.add_argument(
        "--shares",
        default="",
        metavar="N,N",
        help="rows per rank; auto: by measured speed (default: equal)",
    )
    command.add_argument(
        "--preset",
        default="",
        metavar="NAME",
        help=f"settings by name, which the options below replace: {' or '.join(PRESETS)}",
    )
    command.add_argument(
        "--from-checkpoint",
        type=Path,
        metavar="DIR",
        help="with --stage sft, the checkpoint (step_NNNNNN) whose model is fine-tuned; rank 0 reads it",
    )
    add_config_arguments(command, left_out=("parent",))


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `sample` to `parser`."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a step_NNNNNN directory"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="start of the text")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (%(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=number_from_zero,
        default=0.8,
        metavar="X",
        help="0: always the most likely token (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=42, metavar="N", help="seed of the sampling (%(default)s)"
    )


def run_file_from(args: argparse.Namespace) -> RunFile:
    """Load the file of --run-file; without this option, build a RunFile from the other options.

    Raises ConfigError if the file cannot be used, or if an option is invalid.
    """
    values = {name: getattr(args, name, None) for name in RunConfig.field_names()}
    given = {name: value for name, value in values.items() if value is not None}
    if args.run_file:
        if given or args.run_id or args.shares or args.preset:
            raise ConfigError(
                "--run-file already contains all settings. Remove --run-file, or remove --run-id, --shares, "
                "--preset and the options of settings."
            )
        return RunFile.load(args.run_file)
    from_checkpoint = args.from_checkpoint
    if (given.get("stage") == SFT) != bool(from_checkpoint):
        raise ConfigError(
            "--stage sft and --from-checkpoint DIR go together: sft fine-tunes the model of a checkpoint."
        )
    try:
        settings = apply_preset(args.preset, given)
        if from_checkpoint:
            from trainer.checkpoint.storage import read_meta

            settings = sft_settings(read_meta(from_checkpoint, files=()), settings)
        config = RunConfig.from_strings(settings)
    except PresetError as error:
        raise ConfigError(str(error)) from None
    return RunFile(args.run_id or config.default_run_id(), config, shares=parse_shares(args.shares))


def train(args: argparse.Namespace) -> int:
    """`train`: run one attempt at the run on this rank and write outcome.json; returns the exit code.

    args: the parsed options of `train`.
    """
    from trainer.health.attempt import run_attempt
    from trainer.host.logger import RunLogger
    from trainer.host.rank_env import RankEnv

    env = RankEnv.from_environment()

    def start(run_file: RunFile, attempt: Attempt, log: RunLogger) -> str:
        if env.is_host_leader and "torch" not in sys.modules:
            log.info("Importing torch; after a reboot this may take a minute.")
        from trainer.elastic.train import ElasticTrainer, train_elastic
        from trainer.train import Trainer

        tracker_uri = args.tracker_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        of_run, of_rank = (run_file, args.data_dir, args.run_dir), (attempt, log, args.from_checkpoint)
        if not run_file.config.is_elastic or env.world_size == 1:
            return Trainer(*of_run, env, *of_rank).run(tracker_uri)

        def make(env: RankEnv) -> ElasticTrainer:
            return ElasticTrainer(*of_run, env, *of_rank)

        return train_elastic(make, run_file, args.run_dir, env, attempt, log, tracker_uri)

    return run_attempt(args.run_dir, env, RunLogger(env, args.json), lambda: run_file_from(args), start)


def plan(args: argparse.Namespace) -> int:
    """`plan`: set up this rank without training; rank 0 logs a summary of the run and predicted step times.

    The run directory is a temporary one. args: the parsed options of `plan`. Returns the exit code.
    """
    from trainer.health.attempt import Attempt
    from trainer.host.logger import RunLogger, set_up_streams
    from trainer.host.rank_env import RankEnv
    from trainer.outcome import RunEnd
    from trainer.train import Trainer

    set_up_streams()
    env, run_file = RankEnv.from_environment(), run_file_from(args)
    with tempfile.TemporaryDirectory(prefix="nanofleet-plan-") as folder:
        run_dir = Path(folder)
        attempt = Attempt(run_dir, env)
        trainer = Trainer(
            run_file, args.data_dir, run_dir, env, attempt, RunLogger(env), args.from_checkpoint
        )
        setup = trainer.setup
        setup.predicts, setup.trains = True, False
        trainer.watchdog.start()
        try:
            setup.run()
            if env.is_coordinator:
                trainer.log.info(setup.describe())
            setup.group.close()
        except RunEnd as end:
            print(end, file=sys.stderr)
            return 1
        finally:
            trainer.watchdog.stop()
    return 0


def sample(args: argparse.Namespace) -> int:
    """`sample`: print text that a model generates; returns the exit code. args: the parsed options."""
    from trainer.eval import sample

    return sample.run(args)


def chat(args: argparse.Namespace) -> int:
    """`chat`: chat with a model in the terminal; returns the exit code. args: the parsed options."""
    from trainer.chat import terminal

    return terminal.run_chat(args)


def serve(args: argparse.Namespace) -> int:
    """`serve`: run the HTTP server until it is stopped; returns the exit code. args: the parsed options."""
    from trainer.serve import server

    return server.run(args)


class Command(NamedTuple):
    """A subcommand of the trainer.

    help: one line for --help. add_arguments: adds its options to a parser. run: runs the subcommand with the
    parsed options and returns the exit code; it may raise ConfigError or DataError.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "prepare": Command("turn text into shards, a tokenizer and rows", prepare.add_arguments, prepare.run),
    "conversations": Command(
        "turn conversations into data to fine-tune on", chat_cli.add_arguments, chat_cli.run
    ),
    "train": Command("train, as one process or under torchrun", add_train_arguments, train),
    "plan": Command("predict the seconds of a step in each sync mode", add_run_arguments, plan),
    "threads": Command("choose processors and threads", threads_cli.add_arguments, threads_cli.run),
    "bench": Command("measure the seconds of a step and its parts", bench.add_arguments, bench.run),
    "track": Command("send the figures of a run to its tracker", sender.add_arguments, sender.run),
    "again": Command("decide whether to restart a run", restart_policy.add_arguments, restart_policy.run),
    "sample": Command("generate text from a checkpoint", add_sample_arguments, sample),
    "eval": Command("evaluate a checkpoint", evaluation.add_arguments, evaluation.run),
    "chat": Command("chat with a model in the terminal", add_chat_arguments, chat),
    "serve": Command("serve a model over HTTP, with an API like OpenAI's", add_serve_arguments, serve),
    "export": Command(
        "write a checkpoint in the format of nanochat",
        interchange.add_export_arguments,
        interchange.run_export,
    ),
    "import": Command("read files of nanochat", interchange.add_import_arguments, interchange.run_import),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. For an unknown option, print the nearest known one and exit with code 2."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        options = list(commands.choices[args.command]._option_string_actions)
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        hint = f"did you mean {near[0]}?" if near else f"python -m trainer {args.command} --help lists them."
        parser.exit(2, f"{unknown[0]} is no option of {args.command}: {hint}\n")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand in `argv`; returns the exit code.

    After a ConfigError or DataError, its message is printed and the exit code is 2.
    """
    args = parse(argv)
    try:
        return COMMANDS[args.command].run(args)
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    code = main()
    flush_streams()
    # After a peer is lost, threads of Gloo still wait for it, and a normal exit would wait for these threads.
    os._exit(code)
