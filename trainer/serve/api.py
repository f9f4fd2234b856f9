"""The bodies of requests and answers of the API, in the format of OpenAI."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field

from trainer.chat.engine import COLDEST, Sampling


class ApiError(Exception):
    """Raised to answer with an error object. The message is a sentence for the user."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]

    def plain(self) -> dict[str, str]:
        """The message with its text parts joined. Raises ApiError for other parts, such as pictures."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
            raise ApiError(
                400, "A message has a part that is not text. This model reads text only.", "content"
            )
        return {"role": self.role, "content": "".join(part["text"] for part in self.content)}


class GenerationBody(BaseModel):
    """The fields that requests for chats and for completions share. Other fields of OpenAI's are ignored."""

    model: str = ""
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    n: Literal[1] | None = 1

    def sampling(self) -> Sampling:
        """The sampling of the request; without a temperature or top_k it is that of the chat."""
        default = Sampling()
        temperature = default.temperature if self.temperature is None else self.temperature
        if 0 < temperature < COLDEST:
            temperature = 0.0
        return Sampling(
            temperature,
            default.top_k if self.top_k is None else self.top_k,
            self.max_completion_tokens or self.max_tokens or default.max_tokens,
            None if self.seed is None else self.seed % 2**63,
        )


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)


class CompletionBody(GenerationBody):
    prompt: str


class Shape:
    """Builds the answers to one request in OpenAI's format. kind: "chat" or "text"."""

    def __init__(self, kind: Literal["chat", "text"], model: str, fingerprint: str) -> None:
        self.kind = kind
        self.fixed = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, text: str, reason: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= (
            {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        )
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self.fixed, "object": name, "choices": [choice], "usage": usage}

    def event(self, text: str | None, reason: str | None, first: bool = False) -> str:
        """One server-sent event of a streamed answer, as text.

        text: new text; None: none. reason: why the answer has ended; None: it has not. first: whether this is
        the first event of the answer, which in a chat names the role.
        """
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.kind == "chat":
            delta: dict[str, str] = {"role": "assistant"} if first else {}
            choice["delta"] = delta if text is None else {**delta, "content": text}
        else:
            choice["text"] = text or ""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return f"data: {json.dumps({**self.fixed, 'object': name, 'choices': [choice]})}\n\n"
