"""The bodies of the HTTP requests and responses, in the format of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field

from trainer.chat.engine import COLDEST, Sampling


class ApiError(Exception):
    """Raised to answer a request with an error object.

    status: HTTP status. message: a sentence for the user. code: the field `code` of the error object.
    headers: additional HTTP headers of the response.
    """

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers

    def body(self) -> dict[str, Any]:
        """The error object as JSON values: {"error": {"message", "type", "param", "code"}}."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Message(BaseModel):
    """A message of a chat request.

    role: the author of the message. content: the text of the message, or a list of parts {"type": "text",
    "text": text}.
    """

    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]

    def plain(self) -> dict[str, str]:
        """The message as {"role": role, "content": text}, with its parts joined to one text.

        Raises ApiError if a part is not text, such as a picture.
        """
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
            raise ApiError(
                400, "A message has a part that is not text. This model reads text only.", "content"
            )
        return {"role": self.role, "content": "".join(part["text"] for part in self.content)}


class GenerationBody(BaseModel):
    """The fields that chat requests and completion requests share. Other fields of OpenAI's API are ignored.

    model: ignored. stream: whether the answer is sent while it is generated.
    temperature, top_k, seed: how tokens are drawn (see Sampling); None: the default of Sampling.
    max_tokens, max_completion_tokens: the most tokens of the answer; max_completion_tokens has priority.
    n: number of answers; only 1 is possible.
    """

    model: str = ""
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    n: Literal[1] | None = 1

    def sampling(self) -> Sampling:
        """How the tokens of the answer are drawn. A field that is None has the default of Sampling.

        A temperature below COLDEST becomes 0. The seed is taken modulo 2^63.
        """
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
    """A request for the next message of a chat. messages: the conversation so far."""

    messages: list[Message] = Field(min_length=1)


class CompletionBody(GenerationBody):
    """A request to continue a text. prompt: the text."""

    prompt: str


class Shape:
    """Builds the response to one request in OpenAI's format.

    kind: "chat" for a message of a chat, "text" for a continued text. model: name of the model. fingerprint:
    the field system_fingerprint, RUN_ID@STEP.
    """

    def __init__(self, kind: Literal["chat", "text"], model: str, fingerprint: str) -> None:
        self.kind = kind
        self.fixed = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, text: str, reason: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The body of a response that is not streamed, as JSON values.

        text: the answer. reason: why the answer has ended, "stop" or "length". prompt_tokens, tokens: number
        of tokens of the prompt and of the answer.
        """
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

        text: new text of the answer; None: no new text. reason: why the answer has ended; None: it has not
        ended. first: whether this is the first event of the answer; the first event of a chat has the role.
        """
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.kind == "chat":
            delta: dict[str, str] = {"role": "assistant"} if first else {}
            choice["delta"] = delta if text is None else {**delta, "content": text}
        else:
            choice["text"] = text or ""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return f"data: {json.dumps({**self.fixed, 'object': name, 'choices': [choice]})}\n\n"
