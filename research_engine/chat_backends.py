"""Who answers in a chat: a server over HTTP, or a model in this process. Both give the answer piece by piece."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from research_engine.bench.sse import DONE, EventReader

if TYPE_CHECKING:
    from research_engine.llm import LLM

Messages = Sequence[Mapping[str, str]]


class ChatError(ValueError):
    """There is no answer; says why in words for the user."""


@dataclass
class Answered:
    """Of the last answer: its tokens (None where they were not counted), times in seconds, and why it ended."""

    tokens: int | None = None
    first_after: float | None = None
    seconds: float = 0.0
    finish_reason: str = ""

    @property
    def line(self) -> str:
        """For the user."""
        parts = [] if self.tokens is None else [f"{self.tokens} tokens"]
        if self.first_after is not None:
            parts.append(f"first after {self.first_after:.2f} s")
            decoding = self.seconds - self.first_after
            if self.tokens is not None and self.tokens > 1 and decoding > 0:
                parts.append(f"then {(self.tokens - 1) / decoding:.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("cut off at its limit of tokens")
        return ", ".join(parts)


class ChatBackend(Protocol):
    """What `chat` needs."""

    name: str
    answered: Answered

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Pieces of the answer as they come; closing the generator gives the rest up. Raises ChatError."""

    def close(self) -> None: ...


class HttpChat:
    """An OpenAI-compatible server.

    Args:
        base_url: with or without /v1 at its end.
        model: its name there; the first one listed when None.
        key: sent as a bearer token; None sends none.
        settings: laid over every request: temperature, max_tokens and the like.

    Raises:
        ChatError: the address is none, or the server does not answer or lists no model.
    """

    def __init__(self, base_url: str, model: str | None, key: str | None, settings: Mapping[str, Any]) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"base_url = {base_url!r}: must be like http://127.0.0.1:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = base_url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._settings = settings
        self.answered = Answered()
        self.name = model or self._first_model()

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": list(messages), "stream": True,
                "stream_options": {"include_usage": True}, **self._settings}  # fmt: skip
        began = time.perf_counter()
        self.answered = Answered()
        connection, response = self._request("POST", "/v1/chat/completions", json.dumps(body))
        try:
            for piece in self._pieces(response):
                if self.answered.first_after is None:
                    self.answered.first_after = time.perf_counter() - began
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the server broke off: {error or type(error).__name__}") from error
        finally:
            connection.close()  # in the middle of an answer, too: that is how the server hears that it may stop
            self.answered.seconds = time.perf_counter() - began

    def close(self) -> None:
        pass

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[str]:
        events, ended = EventReader(), False
        while not ended:
            data = response.read1(65_536)
            payloads = events.feed(data) if data else events.finish()
            for payload in payloads:
                if payload == DONE:
                    return
                yield from self._chunk(payload)
            ended = not data
        if not self.answered.finish_reason:
            raise ChatError("the server ended the answer without saying why")

    def _chunk(self, payload: bytes) -> Iterator[str]:
        try:
            chunk = json.loads(payload)
            if "error" in chunk:
                raise ChatError(f"the server failed: {_message(payload)}")
            usage = chunk.get("usage")
            if usage:
                self.answered.tokens = usage.get("completion_tokens")
            for choice in chunk.get("choices") or ():
                self.answered.finish_reason = choice.get("finish_reason") or self.answered.finish_reason
                text = (choice.get("delta") or {}).get("content")
                if text:
                    yield text
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise ChatError(f"the server sent something else than an answer: {payload[:200]!r}") from error

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models")
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError, OSError, http.client.HTTPException):
            raise ChatError(f"{self._url}: /v1/models lists no model; name it") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An open answer with status 200."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=10)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a queue in front of the model may be long
            connection.request(method, self._path + path, None if body is None else body.encode(), self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            message = _message(response.read(10_000))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"{self._url}: {error or type(error).__name__}; is the server running?") from None
        except BaseException:
            connection.close()
            raise
        connection.close()
        hint = "; give the key in OPENAI_API_KEY" if response.status in (401, 403) else ""
        raise ChatError(f"{self._url}: HTTP {response.status}: {message}{hint}")


class LocalChat:
    """A model in this process.

    Args:
        llm: with a tokenizer and a chat template.
        settings: fields of SamplingParams.

    Raises:
        ChatError: a setting is wrong, or there is no tokenizer.
    """

    def __init__(self, llm: LLM, settings: Mapping[str, Any]) -> None:
        from research_engine.engine.sampling_params import SamplingParams

        try:
            self._sampling = SamplingParams(**{"max_tokens": None, **settings})
        except (TypeError, ValueError) as error:
            raise ChatError(str(error)) from None
        self._llm, self._turns = llm, 0
        self.name = llm.options.model
        self.answered = Answered()

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        assert self._llm.tokenizer is not None
        engine, name = self._llm.engine, f"chat-{self._turns}"
        self._turns += 1
        began = time.perf_counter()
        self.answered = Answered()
        try:
            (request,) = engine.add_request(name, self._llm.tokenizer.apply_chat_template(messages), self._sampling)
        except ValueError as error:
            raise ChatError(str(error)) from None
        try:
            while not self.answered.finish_reason:
                with _interrupt_after():  # a step must not be torn
                    outputs = engine.step()
                for output in outputs:
                    if output.request is not request:
                        continue
                    if self.answered.first_after is None:
                        self.answered.first_after = time.perf_counter() - began
                    self.answered.finish_reason = output.finish_reason or ""
                    if output.text:
                        yield output.text
        finally:
            if not self.answered.finish_reason:
                engine.abort(name)
            self.answered.tokens = request.num_output_tokens
            self.answered.seconds = time.perf_counter() - began

    def close(self) -> None:
        self._llm.shutdown()


@contextmanager
def _interrupt_after() -> Iterator[None]:
    """Holds Ctrl-C back until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def remember(signum: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _message(body: bytes) -> str:
    from research_engine.bench.backends import error_message

    return error_message(body)
