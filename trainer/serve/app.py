"""The HTTP application: the API of OpenAI for one model, /health, and a web page to chat with the model."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from trainer.chat.answer import Answer
from trainer.chat.engine import ContextOverflowError
from trainer.chat.loaded import NOTICE, Loaded
from trainer.data.conversations import ConversationError, render_for_completion
from trainer.host.memory import is_out_of_memory
from trainer.serve.api import ApiError, ChatBody, CompletionBody, GenerationBody, Shape
from trainer.serve.scheduler import MEMORY, QueueFullError, Scheduler

PAGE = Path(__file__).with_name("page.html")
RETRY_SECONDS = 5
UNFINISHED = ("error", "stopped", MEMORY)  # reasons of the scheduler for an answer that is not complete
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"

Update = tuple[Sequence[int], str | None]


def make_app(scheduler: Scheduler, api_key: str = "") -> FastAPI:
    """The HTTP application that answers requests with `scheduler`.

    api_key: the key that every request must have, except requests for the web page and /health; "": no key.
    """
    app = FastAPI(title="nanofleet", docs_url=None, redoc_url=None, openapi_url=None)

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                "invalid_api_key",
            )

    with_key = [Depends(check_key)]

    @app.exception_handler(ApiError)
    async def show_error(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def show_invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        found = ApiError(400, f"The request is not valid. {where}: {first['msg']}.", "invalid")
        return JSONResponse(found.body(), found.status)

    @app.get("/")
    async def page() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    @app.get("/health")
    async def health() -> Response:
        loaded = scheduler.loaded
        content = {
            "status": "ok" if scheduler.alive else "failed",
            "run_id": loaded.run_id,
            "step": loaded.step,
            "dtype": loaded.dtype,
            "context": loaded.engine.limit,
            "fine_tuned": loaded.fine_tuned,
            "notice": "" if loaded.fine_tuned else NOTICE,
            "active": sum(not each.sequence.done for each in list(scheduler.active)),
            "waiting": len(scheduler.waiting),
            "needs_key": bool(api_key),
        }
        return JSONResponse(content, 200 if scheduler.alive else 503)

    @app.get("/v1/models", dependencies=with_key)
    async def models() -> dict[str, Any]:
        loaded = scheduler.loaded
        created = int(loaded.checkpoint.stat().st_mtime) if loaded.checkpoint.exists() else 0
        entry = {"id": loaded.run_id, "object": "model", "created": created, "owned_by": "nanofleet"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/chat/completions", dependencies=with_key)
    async def chat(body: ChatBody, request: Request) -> Response:
        loaded = scheduler.loaded
        try:
            prompt = render_for_completion([message.plain() for message in body.messages], loaded.tokenizer)
        except ConversationError as error:
            raise ApiError(400, f"The messages are no conversation: {error}.", "messages") from None
        return await answer(loaded, prompt, body, Shape("chat", loaded.run_id, mark(loaded)), request)

    @app.post("/v1/completions", dependencies=with_key)
    async def complete(body: CompletionBody, request: Request) -> Response:
        loaded = scheduler.loaded
        prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(body.prompt)]
        return await answer(loaded, prompt, body, Shape("text", loaded.run_id, mark(loaded)), request)

    async def answer(
        loaded: Loaded, prompt: Sequence[int], body: GenerationBody, shape: Shape, request: Request
    ) -> Response:
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(tokens: Sequence[int], reason: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended, and its event loop is closed
                loop.call_soon_threadsafe(updates.put_nowait, (tokens, reason))

        try:
            job = scheduler.submit(loaded, prompt, body.sampling(), deliver)
        except ContextOverflowError as error:
            raise ApiError(400, str(error), "context_length_exceeded") from None
        except QueueFullError as error:
            raise ApiError(429, str(error), "queue_full", {"Retry-After": str(RETRY_SECONDS)}) from None
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise unfinished(MEMORY) from None
            raise
        headers = {"X-Nanofleet-Run": loaded.run_id, "X-Nanofleet-Step": str(loaded.step)}
        text = Answer(loaded.tokenizer)
        if body.stream:

            async def events() -> AsyncIterator[str]:
                try:
                    yield shape.event("", None, first=True)
                    reason = None
                    while reason is None:
                        tokens, reason = await updates.get()
                        if piece := text.add(tokens):
                            yield shape.event(piece, None)
                    if piece := text.end():
                        yield shape.event(piece, None)
                    if reason in UNFINISHED:
                        yield f"data: {json.dumps(unfinished(reason).body())}\n\n"
                    else:
                        yield shape.event(None, reason)
                    yield "data: [DONE]\n\n"
                finally:
                    job.cancel()  # the client may have disconnected

            return StreamingResponse(events(), media_type="text/event-stream", headers=headers)
        try:
            reason, count = None, 0
            while reason is None:
                try:
                    tokens, reason = await asyncio.wait_for(updates.get(), 1.0)
                except TimeoutError:
                    tokens = []
                count += len(tokens)
                text.add(tokens)
                if reason is None and await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            job.cancel()
        text.end()
        if reason in UNFINISHED:
            raise unfinished(reason)
        return JSONResponse(shape.whole(text.text, reason, len(prompt), count), headers=headers)

    return app


def unfinished(reason: str) -> ApiError:
    """The HTTP error 503 for an answer that is not complete. reason: why it ended, one of UNFINISHED."""
    if reason == MEMORY:
        text = "The host has too little memory for this answer. Shorten the conversation, or try again later."
        return ApiError(503, text, MEMORY, {"Retry-After": str(RETRY_SECONDS)})
    return ApiError(503, "The server stopped before the answer was complete. Try again.", reason)


def mark(loaded: Loaded) -> str:
    """The value of the field system_fingerprint of a response: RUN_ID@STEP.

    loaded: the model that answers.
    """
    return f"{loaded.run_id}@{loaded.step}"
