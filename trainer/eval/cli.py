"""python -m trainer eval: bits per byte, CORE, chat tasks and a sample of text of a checkpoint.

python -m trainer eval --checkpoint runs/mine/checkpoints/step_000100 --data-dir data
python -m trainer eval --checkpoint DIR --core data/core --out evaluation
torchrun --nproc-per-node 2 -m trainer eval --checkpoint DIR --core data/core --out evaluation

If none of --core, --bpb, --chat-task and --sample is given, it generates a sample of text, computes bits per
byte if --data-dir is given, and evaluates CORE if the data directory has a folder core/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.config import DEVICES, ConfigError
from trainer.eval.parts import Parts, parts_of
from trainer.host.logger import RunLogger, set_up_streams
from trainer.host.memory import is_out_of_memory
from trainer.host.rank_env import RankEnv
from trainer.options import number_from_zero


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `eval` to `parser`."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a step_NNNNNN directory")
    add("--data-dir", type=Path, metavar="DIR", help="the output of prepare, for bits per byte and CORE")
    add("--bpb", action="store_true", help="compute bits per byte on the validation split")
    add("--eval-tokens", type=int, default=0, metavar="N", help="validation tokens (default: as in the run)")
    add("--core", type=Path, metavar="BUNDLE", help="evaluate CORE on the tasks in this folder")
    add("--core-max-per-task", type=int, default=0, metavar="N", help="items of a task at most; 0: all")
    add(
        "--core-url",
        default="",
        metavar="URL",
        help="zip file of a bundle, or nanochat for its own: downloads it to --core first",
    )
    add("--core-sha256", default="", metavar="HEX", help="sha256 of the zip file")
    add(
        "--chat-task",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file of questions; may be given again",
    )
    add("--chat-samples", type=int, default=1, metavar="N", help="answers to a question (%(default)s)")
    add(
        "--chat-temperature",
        type=number_from_zero,
        default=0.0,
        metavar="X",
        help="0: no sampling (%(default)s)",
    )
    add(
        "--chat-max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of an answer at most (%(default)s)",
    )
    add("--sample", action="store_true", help="generate a sample of text")
    add("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="folder for eval.json and the results of CORE tasks")
    add("--run-dir", type=Path, metavar="DIR", help="write outcome.json there at the end, as train does")
    add("--json", action="store_true", help="log one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """`eval`: evaluate a checkpoint; returns the exit code. args: the parsed options.

    Raises ConfigError or DataError if an option, the checkpoint or a data file cannot be used.
    """
    parts = parts_of(args)
    env = RankEnv.from_environment()
    log = RunLogger(env, args.json)
    if args.run_dir is not None:
        return _run_attempt(args, parts, env, log)
    set_up_streams()
    from trainer.eval.evaluation import Evaluation
    from trainer.outcome import EXIT_CODES, RunEnd

    try:
        Evaluation(args, parts, env, log).run()
    except RunEnd as end:
        print("\n".join(filter(None, (str(end), end.detail))), file=sys.stderr)
        return EXIT_CODES[end.outcome]
    except (OSError, RuntimeError, MemoryError) as error:
        raise ConfigError(_sentence(args, error)) from None
    return 0


def _run_attempt(args: argparse.Namespace, parts: Parts, env: RankEnv, log: RunLogger) -> int:
    """Evaluate, and write the outcome to outcome.json in --run-dir; returns the exit code.

    The outcome is also written if SIGTERM stops the evaluation.
    """
    from trainer.health.attempt import Attempt, run_attempt
    from trainer.outcome import Final

    def start(_: None, attempt: Attempt, log: RunLogger) -> str:
        from trainer.eval.evaluation import Evaluation
        from trainer.health.run_status import RunStatus

        status = RunStatus(args.run_dir, env, args.run_dir.name)
        status.enter("evaluate")
        status.start()
        try:
            Evaluation(args, parts, env, log).run()
        except (OSError, RuntimeError, MemoryError) as error:
            raise Final(_sentence(args, error)) from None
        finally:
            status.enter("done")
            status.stop()
        return f"Evaluated {args.checkpoint.name}."

    return run_attempt(args.run_dir, env, log, lambda: None, start)


def _sentence(args: argparse.Namespace, error: BaseException) -> str:
    """The message for an out-of-memory error or an OSError. Any other `error` is raised again."""
    if is_out_of_memory(error):
        return (
            "This host has too little memory to evaluate the model. Stop other programs there, or evaluate "
            "on a host with more."
        )
    if not isinstance(error, OSError):
        raise error
    return f"Cannot write to {error.filename or args.out}: {error.strerror or error}."
