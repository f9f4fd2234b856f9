"""How an attempt at an elastic run ends without ranks of other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import pytest

from trainer.elastic.train import ElasticTrainer
from trainer.train import Trainer


def test_an_interrupt_from_the_keyboard_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, str]] = []

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    trainer = object.__new__(ElasticTrainer)
    membership = SimpleNamespace(
        stop=lambda: None, end=lambda outcome, reason: ended.append((outcome, reason))
    )
    trainer.setup = SimpleNamespace(membership=membership)
    monkeypatch.setattr(Trainer, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    ((outcome, reason),) = ended
    assert outcome == "stopped"
    assert reason.startswith("Interrupted from the keyboard.")
