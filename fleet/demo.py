"""The demo: prepares a corpus, creates a lab, and trains a model there with the ordinary playbooks."""

import getpass
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import filesize
from rich.text import Text

from fleet import CACHE, ROOT, FleetError, corpus
from fleet.exchange import ask, make_conversations, served_at
from fleet.inventory import usual
from fleet.playbooks import Job
from fleet.progress import Screen, done_line, report
from fleet.stages import run_command, run_playbook
from fleet.text import number
from fleet.watch import FAILED, FINISHED, RunFollower, close
from trainer.formatting import duration

FREE_GB = 8
"""GB of disk space for the lab's image, its hosts with a venv each, the wheels and the corpus."""

_VOCAB_SIZE = 4096
_SETTINGS = {"sequence_len": 256, "total_batch_size": 4096, "warmup_steps": 10, "eval_tokens": 16384}
_CHAT_SETTINGS = {"stage": "sft", "steps": 20, "eval_tokens": 4096}


@dataclass(frozen=True)
class Demo:
    """The options of `python -m fleet demo`.

    corpus: a folder of text; None for text of this machine.
    depth, steps: number of layers of the model, and number of training steps.
    lab: name of the lab. hosts: number of its hosts.
    run_id: name of the run; "" for the default name.
    extra: `-e` options for the playbooks.
    chat: whether the demo fine-tunes the trained model on conversations and asks it questions.
    """

    corpus: str | None = None
    depth: int = 4
    steps: int = 60
    lab: str = "lab"
    hosts: int = 2
    run_id: str = ""
    extra: tuple[str, ...] = ()
    chat: bool = True

    @property
    def where(self) -> str:
        """The path of the lab's inventory below ROOT; "" if Ansible reads this inventory without -i."""
        if self.lab != "lab":
            return f".lab/{self.lab}/inventory"
        return "" if usual() == [self.inventory] else "inventory/lab"

    @property
    def inventory(self) -> str:
        """The path of the lab's inventory."""
        return str(ROOT / ("inventory/lab" if self.lab == "lab" else self.where))

    @property
    def folder(self) -> Path:
        """The folder of the demo's data and conversations; each lab has its own folder."""
        return CACHE / "demo" if self.lab == "lab" else CACHE / "demo" / self.lab

    @property
    def down(self) -> str:
        """The command that removes the lab, for a message."""
        return "make lab-down" if self.lab == "lab" else f"make lab-down LAB={self.lab}"


def run(screen: Screen, demo: Demo, picture: str | None = None) -> int:
    """Run the whole demo; returns the exit code.

    screen: shows the progress. demo: the options. picture: path of an SVG picture of the screen; None for no
    picture. Raises FleetError if a person must fix something first, such as a missing program.
    """
    started = time.monotonic()
    check_machine()
    sources = corpus.own_sources(demo.corpus) if demo.corpus else corpus.machine_sources()
    password = become_password()
    seconds: list[tuple[str, float]] = []
    data = demo.folder / "data"

    good, took = run_command(
        screen, "corpus", "reading text, training a tokenizer", prepare_command(sources, data)
    )
    if not good:
        return FAILED
    seconds.append(("corpus", took))
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    text_size = filesize.decimal(manifest["text_bytes"])
    screen.say(done_line("corpus", took, f"{text_size} of text in {number(manifest['documents'])} documents"))

    run_id = demo.run_id or time.strftime("demo-%Y%m%d-%H%M%S")
    settings = {"data_dir": data, "depth": demo.depth, "steps": demo.steps, "run_id": run_id, **_SETTINGS}
    args = [*options(settings), *demo.extra]
    lab = ["-e", "lab_state=up", "-e", f"lab_name={demo.lab}", "-e", f"lab_hosts={demo.hosts}"]
    for job in (
        Job("lab", "lab.yml", args=lab),
        Job("setup", "setup.yml", inventory=demo.inventory, args=args),
        Job("start", "train.yml", inventory=demo.inventory, args=args),
    ):
        job.become_password = password
        if not run_playbook(screen, job):
            if job.name != "lab":
                screen.say(Text(f"\nThe lab is still running. Remove it: {demo.down}"))
            return FAILED
        seconds.append((job.name, job.seconds))

    follower = RunFollower(screen, demo.inventory, args, become_password=password)
    before = time.monotonic()
    code = follower.follow()
    seconds.append(("train", time.monotonic() - before))
    exchange: list[tuple[str, str]] = []
    if code == FINISHED:
        screen.say(done_line("train", seconds[-1][1]))
        if demo.chat:
            before = time.monotonic()
            try:
                exchange = talk(screen, demo, data, run_id, password)
            except FleetError as error:
                exchange, code = [("chat", str(error))], FAILED
            code = code if exchange else FAILED
            seconds.append(("chat", time.monotonic() - before))
    total, option = time.monotonic() - started, f"-i {demo.where} " if demo.where else ""
    took_what = "  ".join(f"{name} {duration(spent)}" for name, spent in seconds)
    close(
        screen,
        follower,
        [
            *exchange,
            ("took", f"{duration(total)}  ({took_what})"),
            ("next", f"The lab runs. Type: . .venv/bin/activate; ansible-playbook {option}status.yml"),
            ("stop", f"Remove the lab. Type: {demo.down}"),
        ],
        title="python -m fleet demo",
        picture=picture,
    )
    return code


def options(settings: Mapping[str, object]) -> list[str]:
    """The options `-e NAME=VALUE` of ansible-playbook, as arguments. settings: {NAME: VALUE}."""
    return [word for name, value in settings.items() for word in ("-e", f"{name}={shlex.quote(str(value))}")]


def talk(screen: Screen, demo: Demo, data: Path, run_id: str, password: str | None) -> list[tuple[str, str]]:
    """Fine-tune the model of the run `run_id`, serve it and ask it questions.

    data: the data directory of the demo. password: password for sudo; None if sudo needs no password. Returns
    (name, text) lines for the report; [] if a playbook or the fine-tuning has failed. Raises FleetError if
    the text has too few sentences, or the model does not answer.
    """
    file = data.parent / "chats.jsonl"
    questions = make_conversations(data, file)
    tuned = f"{run_id}-chat"
    settings = {"data_dir": data, "from_run": run_id, "conversations": file, "run_id": tuned}
    args = [*options({**settings, **_CHAT_SETTINGS}), *demo.extra]
    job = Job("tune", "train.yml", inventory=demo.inventory, args=args, become_password=password)
    if not run_playbook(screen, job):
        return []
    follower = RunFollower(screen, demo.inventory, args, become_password=password)
    before = time.monotonic()
    if follower.follow() != FINISHED:
        screen.say(report(follower.view))
        return []
    screen.say(done_line("tune", job.seconds + time.monotonic() - before, f"{_CHAT_SETTINGS['steps']} steps"))
    job = Job(
        "serve",
        "serve.yml",
        inventory=demo.inventory,
        args=options({"run_id": tuned}),
        become_password=password,
    )
    if not run_playbook(screen, job):
        return []
    url = served_at(job.stage.notes)
    lines = [line for question in questions for line in (("you", question), ("model", ask(url, question)))]
    honest = (
        f"A model of this size has the form of the text after {demo.steps} steps, not its sense. "
        f"Talk to it: {url}/"
    )
    return [*lines, ("chat", honest)]


def check_machine(system: str | None = None, free_bytes: int | None = None) -> None:
    """Raise FleetError if the lab cannot run here: not Linux, no podman, or less than FREE_GB free.

    system, free_bytes: name of the system and free disk space in bytes; None: those of this machine.
    """
    if (system or platform.system()) != "Linux":
        raise FleetError(
            "The demo's hosts are Linux containers, so it needs a Linux machine. Training on real hosts "
            "works from here: copy inventory/sample, list your hosts in it, and type: "
            "python -m fleet train -i YOUR_INVENTORY"
        )
    if not shutil.which("podman"):
        raise FleetError(
            "podman is missing: the lab's hosts are its containers. Fix: make lab-tools (or install it: "
            "sudo apt-get install podman runc netavark aardvark-dns mmdebstrap rsync)"
        )
    free = shutil.disk_usage(ROOT).free if free_bytes is None else free_bytes
    if free < FREE_GB * 1e9:
        raise FleetError(
            f"{free / 1e9:.1f} GB are free at {ROOT}; the lab, its wheels and its data need {FREE_GB} GB. "
            "Make room and run the demo again."
        )


def become_password() -> str | None:
    """Ask for the sudo password of this machine; None for root, or if sudo needs no password.

    The password stays in this process. Raises FleetError if there is no sudo, or no terminal to ask in, or if
    sudo refuses the password.
    """
    if os.geteuid() == 0:
        return None
    if not shutil.which("sudo"):
        raise FleetError("The lab needs root for its containers, and there is no sudo. Run the demo as root.")
    if subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0:
        return None
    if not sys.stdin.isatty():
        raise FleetError(
            "The lab needs root for its containers, and sudo asks for a password, which cannot be typed "
            "here. Run the demo in a terminal, or as root."
        )
    password = getpass.getpass("The lab's containers need root. Password for sudo: ")
    tried = subprocess.run(
        ["sudo", "-S", "-p", "", "true"], input=f"{password}\n", capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise FleetError(
            f"sudo refused: {tried.stderr.strip() or 'no reason given'}. Check the password and that this "
            "user may use sudo, then run the demo again."
        )
    return password


def prepare_command(sources: Sequence[Path], data: Path) -> list[str]:
    """The command `python -m trainer prepare` that writes shards and a tokenizer of `sources` to `data`.

    The result is a list of the program and its arguments. Vocabulary and size of the text are those of the
    demo, smaller than the defaults of `prepare`.
    """
    command = [sys.executable, "-m", "trainer", "prepare", "--out", str(data)]
    for source in sources:
        command += ["--source", str(source)]
    return [*command, "--vocab-size", str(_VOCAB_SIZE), "--max-bytes", str(corpus.MAX_BYTES)]
