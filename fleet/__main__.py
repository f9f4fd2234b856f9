"""The console's commands. Run as ``python -m fleet {demo,train,watch} --help``."""

import argparse
import dataclasses
import getpass
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if any(find_spec(name) is None for name in ("ansible", "ansible_runner", "rich")):
    sys.exit(
        "fleet: this Python lacks the console's packages. Fix: make venv, then .venv/bin/python -m fleet"
    )

from fleet import FleetError, demo, inventory
from fleet.playbooks import CancelledError, Job
from fleet.progress import Screen
from fleet.runview import commands
from fleet.stages import run_playbook
from fleet.watch import FAILED, RunFollower, close

USAGE, INTERRUPTED = 2, 130
_CODES = """exit codes: 0 the run finished; 1 a playbook or the run failed; 2 something must be fixed first;
3 the run was stopped before its end; 130 left with Ctrl-C (a run that has started continues)"""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the command in it; returns the exit code (see the epilog of --help)."""
    args = parser().parse_args(argv)
    screen = Screen()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # a closed terminal ends a playbook as Ctrl-C does
    try:
        with screen:
            return int(args.command(screen, args))
    except FleetError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return USAGE
    except (CancelledError, KeyboardInterrupt):
        print(_interrupted(args), file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of `python -m fleet` with its commands demo, train and watch."""
    top = argparse.ArgumentParser("python -m fleet", description=__doc__, epilog=_CODES)
    commands = top.add_subparsers(required=True, metavar="{demo,train,watch}")

    one = commands.add_parser(
        "demo", help="train a small model on a lab of this machine, and ask it questions", epilog=_CODES
    )
    one.add_argument(
        "--corpus", metavar="DIR", help="a folder of text of your own (default: text of this machine)"
    )
    one.add_argument("--depth", type=_positive, default=4, help="number of layers of the model (%(default)s)")
    one.add_argument("--steps", type=_positive, default=demo.Demo.steps, help="training steps (%(default)s)")
    one.add_argument("--lab", default="lab", metavar="NAME", help="the lab's name (%(default)s)")
    one.add_argument("--hosts", type=_positive, default=2, help="hosts of the lab (%(default)s)")
    one.add_argument(
        "--no-chat",
        dest="chat",
        action="store_false",
        help="end after training: do not fine-tune the model or ask it questions",
    )
    _add_shared(one, "the run's name (default: demo-DATE-TIME)", "a setting of the run; may be given again")
    one.set_defaults(command=_demo, name="demo", inventory=None)

    for name, text in (
        ("train", "start a run on the inventory's hosts (train.yml) and follow it to its end"),
        ("watch", "follow a run to its end, or show the result of one that has ended"),
    ):
        one = commands.add_parser(name, help=text, description=text, epilog=_CODES)
        where = "the hosts (default: ANSIBLE_INVENTORY, else inventory/lab)"
        one.add_argument("-i", "--inventory", metavar="PATH", help=where)
        one.add_argument(
            "-K", "--ask-become-pass", action="store_true", help="ask for the hosts' sudo password"
        )
        run = "the run (default of train: named by its settings; of watch: the active run, else the last)"
        _add_shared(one, run, "a setting, as for ansible-playbook; may be given again")
        one.set_defaults(command=_start_and_follow, name=name, started=False)
    return top


def _add_shared(command: argparse.ArgumentParser, run: str, settings: str) -> None:
    """Add the options that all commands have. run, settings: the help texts of --run-id and of -e."""
    command.add_argument("--run-id", default="", metavar="ID", help=run)
    command.add_argument("--record", metavar="FILE.svg", help="also write the screen as a picture")
    command.add_argument(
        "-e", dest="extra", action="append", default=[], metavar="SETTING=VALUE", help=settings
    )


def _demo(screen: Screen, args: argparse.Namespace) -> int:
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(demo.Demo)}
    what = demo.Demo(**{**given, "extra": _extra(args.extra)})
    args.inventory = what.inventory if what.where else None
    return demo.run(screen, what, args.record)


def _start_and_follow(screen: Screen, args: argparse.Namespace) -> int:
    if args.inventory and Path(args.inventory).exists():
        args.inventory = str(Path(args.inventory).absolute())
    inventory.read(args.inventory)
    password = getpass.getpass("BECOME password: ") if args.ask_become_pass else None
    words = list(_extra(args.extra))
    if args.run_id:
        words += ["-e", f"run_id={args.run_id}"]
    if args.name == "train":
        job = Job("train", "train.yml", inventory=args.inventory, args=words, become_password=password)
        if not run_playbook(screen, job):
            return FAILED
        args.started = True
    follower = RunFollower(screen, args.inventory, words, become_password=password)
    code = follower.follow()
    close(screen, follower, title=f"python -m fleet {args.name}", picture=args.record)
    return code


def _interrupted(args: argparse.Namespace) -> str:
    asks = getattr(args, "ask_become_pass", False)
    options = commands.options([args.inventory] if args.inventory else [], [], asks, Path.cwd())
    run = shlex.quote(args.run_id)
    of_run, watched = (f" -e run_id={run}", f"--run-id {run}") if args.run_id else ("", "")
    stop = f"Stop the run:     ansible-playbook {options}stop.yml{of_run}"
    if args.name == "train" and not args.started:
        lines = [
            "Stopped while starting the run: some hosts may have begun. Each step is safe to repeat.",
            f"Show the status:  ansible-playbook {options}status.yml{of_run}",
            stop,
        ]
    else:
        lines = [
            f"Left the {'demo' if args.name == 'demo' else 'run'}; a run that has started continues.",
            f"Watch the run:    python -m fleet watch {options}{watched}".rstrip(),
            stop,
        ]
    if args.name == "demo":
        lines.append(f"Remove the lab:   {demo.Demo(lab=args.lab).down}")
    return "\n".join(lines)


def _extra(values: list[str]) -> tuple[str, ...]:
    return tuple(word for value in values for word in ("-e", value))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
