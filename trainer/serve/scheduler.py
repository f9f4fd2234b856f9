"""Continuous batching: a thread generates the answers to all active requests together, step by step.

    scheduler = Scheduler(loaded, batch=16, queue=64); scheduler.start()
    request = scheduler.submit(loaded, prompt_ids, sampling, deliver)
    scheduler.replace(newer)  # active requests keep their model

Waiting requests become active in the order of arrival, as soon as fewer than `batch` requests are active. A
step adds one token to each active request (or computes a piece of its prompt), so that no request waits for
the end of another answer.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from trainer.chat.engine import Sampling, SequenceState
from trainer.chat.loaded import Loaded
from trainer.host.memory import is_out_of_memory

MEMORY = "out_of_memory"  # the reason of the end of an answer
Deliver = Callable[[Sequence[int], str | None], None]


class QueueFullError(Exception):
    """Raised for a new request if the queue is full. The message is a sentence for the user."""


class Request:
    """A request for an answer, queued or active. `cancel` ends its generation at the next step.

    loaded: the model that answers. sequence: the tokens of prompt and answer so far. deliver: see
    `Scheduler.submit`. cancelled: whether `cancel` was called.
    """

    def __init__(self, loaded: Loaded, sequence: SequenceState, deliver: Deliver) -> None:
        self.loaded, self.sequence, self.deliver = loaded, sequence, deliver
        self.cancelled = False

    def cancel(self) -> None:
        """End the generation of the answer at the next step."""
        self.cancelled = True


class Scheduler:
    """Generates the answers to all requests in a thread, up to `batch` answers at the same time.

    loaded: the model for new requests. batch: maximum number of active requests. queue: maximum number of
    waiting requests. active: the requests whose answers are being generated. waiting: the requests that wait
    for their turn, in the order of arrival.
    """

    def __init__(self, loaded: Loaded, batch: int, queue: int) -> None:
        self.loaded, self.batch, self.queue = loaded, batch, queue
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End all requests with the reason "stopped", and end the thread.

        seconds: maximum time to wait until the thread has ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def replace(self, loaded: Loaded) -> None:
        """Set the model for later requests to `loaded`; waiting and active requests keep their model."""
        with self._changed:
            self.loaded = loaded

    def submit(self, loaded: Loaded, prompt: Sequence[int], sampling: Sampling, deliver: Deliver) -> Request:
        """Queue a request to answer `prompt` with the model `loaded`; returns the request.

        prompt: token ids. sampling: how tokens are drawn. deliver: called as deliver(new token ids, reason)
        from the scheduler's thread. reason is None until the answer ends; then it is "stop", "length",
        "stopped", MEMORY or "error". Raises QueueFullError if the queue is full, ContextOverflowError if the
        prompt is too long.
        """
        request = Request(loaded, loaded.engine.start(prompt, sampling), deliver)
        with self._changed:
            self.waiting = deque(each for each in self.waiting if not each.cancelled)
            waiting = len(self.waiting) - max(0, self.batch - len(self.active))
            if waiting >= self.queue:
                raise QueueFullError(
                    f"{len(self.waiting)} requests wait already, and {len(self.active)} are answered. "
                    "Try again in a few seconds."
                )
            self.waiting.append(request)
            self._changed.notify()
        return request

    def _run(self) -> None:
        while self._admit():
            groups: dict[int, list[Request]] = {}
            for request in self.active:
                groups.setdefault(id(request.loaded), []).append(request)
            for group in groups.values():
                self._advance(group)
            with self._changed:
                self.active = [each for each in self.active if not each.sequence.done]
        for request in [*self.active, *self.waiting]:
            request.deliver([], "stopped")

    def _admit(self) -> bool:
        """Wait until there is a request, then activate waiting requests. Returns False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self.active or self.waiting or self._stopping)
            self.active = [each for each in self.active if not each.cancelled]
            while self.waiting and len(self.active) < self.batch:
                request = self.waiting.popleft()
                if not request.cancelled:
                    self.active.append(request)
            return not self._stopping

    def _advance(self, group: Sequence[Request]) -> None:
        """One step of the requests of one model. An error ends these requests, not the server."""
        try:
            stepped = group[0].loaded.engine.step([request.sequence for request in group])
        except Exception as error:
            if not is_out_of_memory(error):
                traceback.print_exc()
            stepped = [[] for _ in group]
            for request in group:
                request.sequence.reason = MEMORY if is_out_of_memory(error) else "error"
        for request, tokens in zip(group, stepped, strict=True):
            if tokens or request.sequence.done:
                request.deliver(tokens, request.sequence.reason)
