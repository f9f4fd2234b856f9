"""The chat with a model in a terminal. With --prompt, the model answers once.

python -m trainer chat --run-dir runs/mine
python -m trainer chat --checkpoint runs/mine/checkpoints/step_000100 --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import replace

from trainer.chat.answer import Answer
from trainer.chat.engine import COLDEST, ContextOverflowError, Sampling, run
from trainer.chat.loaded import NOTICE, Loaded, load_from
from trainer.config import ConfigError
from trainer.data.conversations import Conversation, render_for_completion
from trainer.host.logger import set_up_streams

HELP = """\
/clear           forget the conversation
/temperature X   0: always the most likely token; higher: more varied
/top-k N         draw from the N most likely tokens; 0: from all
/help            show this list
/quit            end; Ctrl-D too
Ctrl-C stops an answer."""


class Chat:
    """A conversation with a model in the terminal.

    loaded: the model that answers. sampling: how the tokens of its answers are drawn. messages: the
    conversation so far, a list of dicts with role and content.
    """

    def __init__(self, loaded: Loaded, sampling: Sampling) -> None:
        self.loaded, self.sampling = loaded, sampling
        self.messages: Conversation = []

    def ask(self, text: str) -> None:
        """Print the answer to `text` while it is generated. Ctrl-C stops it and keeps the part so far.

        Raises ContextOverflowError if the conversation with `text` leaves no room for an answer; `text` is
        then not added to the conversation.
        """
        asked: Conversation = [*self.messages, {"role": "user", "content": text}]
        engine, answer = self.loaded.engine, Answer(self.loaded.tokenizer)
        sequence = engine.start(render_for_completion(asked, self.loaded.tokenizer), self.sampling)
        self.messages = asked
        try:
            for token in run(engine, sequence):
                print(answer.add([token]), end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(answer.end())
        self.messages.append({"role": "assistant", "content": answer.parts})

    def command(self, line: str) -> bool:
        """Run a command of the chat, such as "/clear"; returns False if the command ends the chat."""
        name, _, value = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/clear":
                self.messages = []
                print("The conversation is empty.")
            case "/temperature" | "/top-k":
                self._set(name, value.strip())
            case "/help":
                print(HELP)
            case _:
                print(f"{name} is no command. /help lists them.")
        return True

    def _set(self, name: str, value: str) -> None:
        try:
            if name == "/top-k":
                number: float = int(value)
                changed = replace(self.sampling, top_k=int(value))
            else:
                number = float(value)
                changed = replace(self.sampling, temperature=number)
            check_sampling(changed)
        except (ValueError, ConfigError):
            print(f"{name} takes a number from 0, for example {name} {'50' if name == '/top-k' else '0.6'}.")
            return
        self.sampling = changed
        print(f"{name[1:]} is {number:g}.")


def check_sampling(sampling: Sampling) -> None:
    """Raise ConfigError if a field of `sampling` is out of range."""
    temperature = sampling.temperature
    if not (temperature == 0 or COLDEST <= temperature < 1000):
        raise ConfigError(f"The temperature is {temperature:g}: it takes 0, or {COLDEST:g} to 1000.")
    if sampling.top_k < 0:
        raise ConfigError(f"--top-k is {sampling.top_k}: it takes 0 (all tokens) or a number of tokens.")
    if sampling.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {sampling.max_tokens}: it must be at least 1.")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**63:
        raise ConfigError(f"--seed is {sampling.seed}: it takes a whole number from 0, below 2^63.")


def run_chat(args: argparse.Namespace) -> int:
    """Run the subcommand `chat`: chat until the person ends it, or answer --prompt; returns the exit code 0.

    Raises ConfigError if an option is invalid or --prompt is too long. Also raises the errors of `load_from`.
    """
    set_up_streams()
    sampling = Sampling(args.temperature, args.top_k, args.max_tokens, args.seed)
    check_sampling(sampling)
    loaded = load_from(args)
    chat = Chat(loaded, sampling)
    if not loaded.fine_tuned:
        print(NOTICE, file=sys.stderr)
    if args.prompt is not None:
        try:
            chat.ask(args.prompt)
        except ContextOverflowError as error:
            raise ConfigError(str(error)) from None
        return 0
    if isinstance(sys.stdin, io.TextIOWrapper):  # a test may have put something else there
        sys.stdin.reconfigure(errors="replace")
    print(f"{loaded.name} ({loaded.dtype}). /help lists the commands.", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends.")
            continue
        if line.startswith("/"):
            if not chat.command(line):
                return 0
        elif line:
            try:
                chat.ask(line)
            except ContextOverflowError as error:
                print(f"{error} /clear empties it.")
