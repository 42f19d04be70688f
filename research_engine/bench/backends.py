"""The OpenAI protocol as a load generator speaks it: the body of a request, and what one answer said and when."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from research_engine.bench.datasets import Sample
from research_engine.bench.sse import DONE, EventReader

# name -> path of the endpoint
BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
_ERROR_BYTES = 2000  # kept of the body of a refusal


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields that are read of a chunk or of a whole answer; the others are skipped without making objects."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None
    data: list[msgspec.Raw] | None = None


_DECODE = msgspec.json.Decoder(_Answer).decode


@dataclass(slots=True)
class Observation:
    """What became of one request, as its sender saw it. Times are clock seconds.

    Attributes:
        sample: what was asked.
        scheduled: when it was due. sent: when it was written or a connection was sought; None: it never was.
        times: when each chunk with new text was read; an end token, which has none, counts as well.
        finished: when the answer was whole or had failed; None while it is under way.
        text: parts of the answer.
        finish_reason: of the answer; "" before.
        prompt_tokens, output_tokens: as the server counts them; None where it does not say.
        error: why it failed; None where it did not.
    """

    sample: Sample
    scheduled: float
    sent: float | None = None
    times: list[float] = field(default_factory=list)
    finished: float | None = None
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None

    @property
    def is_completed(self) -> bool:
        return self.finished is not None and self.error is None

    @property
    def is_failed(self) -> bool:
        return self.error is not None


class Call:
    """Reads one answer into an `Observation` (a `connection.Reader`).

    Args:
        seen: filled in.
        streamed: the answer comes as server-sent events.
        on_finish: called once, when the answer is whole or has failed.
    """

    __slots__ = ("_body", "_done", "_events", "_last", "_on_finish", "_status", "_streamed", "seen")

    def __init__(self, seen: Observation, streamed: bool, on_finish: Any) -> None:
        self.seen = seen
        self._streamed = streamed
        self._on_finish = on_finish
        self._status = 0
        self._events = EventReader()
        self._body = bytearray()
        self._done = False
        self._last: float | None = None  # the chunk with the finish reason

    def on_status(self, status: int, content_type: str) -> None:
        self._status = status
        if self._streamed and status == 200 and "event-stream" not in content_type:
            self._streamed = False
            self._fail(f"a stream was asked for, the answer is {content_type or 'of no type'}")

    def on_body(self, data: bytes, now: float) -> None:
        if self._status == 200 and self._streamed:
            for payload in self._events.feed(data):
                self._chunk(payload, now)
        elif self._status == 200 or len(self._body) < _ERROR_BYTES:
            self._body += data

    def on_end(self, now: float) -> None:
        if self._status != 200:
            self._fail(f"HTTP {self._status}: {error_message(bytes(self._body))}")
        elif self._streamed:
            for payload in self._events.finish():
                self._chunk(payload, now)
            if not self._done and not self.seen.finish_reason:
                self._fail("the stream ended without a finish reason")
        elif self.seen.error is None:
            self._whole(now)
        self._finish(now)

    def on_failure(self, why: str, now: float) -> None:
        self._fail(why)
        self._finish(now)

    def _chunk(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self._done = True
            return
        try:
            answer = _DECODE(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(f"a chunk is no answer of this protocol ({error}): {payload[:200]!r}")
            return
        seen = self.seen
        if answer.error is not None:
            self._fail(error_message(payload))
        if answer.choices:
            choice = answer.choices[0]
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if text:
                seen.times.append(now)
                seen.text.append(text)
            elif delta is not None and delta.tool_calls:
                seen.times.append(now)
            if choice.finish_reason:
                seen.finish_reason = choice.finish_reason
                self._last = now
        if answer.usage is not None and answer.usage.completion_tokens is not None:
            seen.prompt_tokens = answer.usage.prompt_tokens
            seen.output_tokens = answer.usage.completion_tokens

    def _whole(self, now: float) -> None:
        """An answer in one piece: its one time is the end."""
        try:
            answer = _DECODE(bytes(self._body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(f"the answer is none of this protocol ({error}): {bytes(self._body[:200])!r}")
            return
        if answer.error is not None:
            self._fail(error_message(bytes(self._body)))
        seen = self.seen
        if answer.usage is not None:
            seen.prompt_tokens, seen.output_tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
        if answer.choices:
            choice = answer.choices[0]
            text = choice.text if choice.message is None else choice.message.content
            seen.text.append(text or "")
            seen.finish_reason = choice.finish_reason or ""
        elif answer.data is None:
            self._fail("the answer has neither choices nor data")

    def _fail(self, why: str) -> None:
        if self.seen.error is None:
            self.seen.error = why

    def _finish(self, now: float) -> None:
        """A last chunk without text is the end token when the answer stopped and more tokens are counted than came."""
        seen, last = self.seen, self._last
        more_counted = (seen.output_tokens or 0) > len(seen.times)
        if seen.finish_reason == "stop" and more_counted and last is not None and last > max(seen.times, default=0.0):
            seen.times.append(last)
        seen.finished = now
        self._on_finish(self)


def request_body(
    backend: str, sample: Sample, *, model: str, streamed: bool, ignore_eos: bool, extra: Mapping[str, Any]
) -> bytes:
    """The JSON body of a request; `extra` is laid over it."""
    body: dict[str, Any] = {"model": model}
    if backend == "openai-embeddings":
        body["input"] = sample.prompt
    else:
        if backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.output_tokens
        else:
            body["prompt"] = sample.prompt
            body["max_tokens"] = sample.output_tokens
        body["stream"] = streamed
        if streamed:
            body["stream_options"] = {"include_usage": True}
        if ignore_eos:
            body["ignore_eos"] = True
    body.update(extra)
    return msgspec.json.encode(body)


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, else the body's beginning."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace").strip() or "no body"
    while isinstance(value, dict) and ("error" in value or "message" in value or "detail" in value):
        value = value.get("error") or value.get("message") or value.get("detail")
    return value if isinstance(value, str) else json.dumps(value)[:200]


def token_gaps(seen: Observation, output_tokens: int) -> list[float]:
    """Gaps between consecutive tokens in seconds; several in one chunk are one gap and zeros (docs/metrics.md).

    Which chunk held several does not matter: the gaps are those between chunks and as many zeros as tokens are left.
    """
    gaps = [later - earlier for earlier, later in zip(seen.times, seen.times[1:], strict=False)]
    return gaps + [0.0] * (output_tokens - 1 - len(gaps))


def output_tokens_of(observations: Sequence[Observation], count: Any) -> list[int]:
    """Tokens of each answer: as the server counts them, else by `count(text)`, else one a chunk."""
    lengths = []
    for seen in observations:
        if seen.output_tokens is not None:
            lengths.append(seen.output_tokens)
        elif count is not None and seen.text:
            lengths.append(count("".join(seen.text)))
        else:
            lengths.append(len(seen.times))
    return lengths
