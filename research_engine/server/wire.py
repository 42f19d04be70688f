"""What the HTTP process and the engine process say to each other: msgpack messages, each after its length.

HTTP -> engine: Add, Abort, Embed.                    engine -> HTTP: Ready or Failed once, then Progress, Refused.
A frame is 4 bytes of length, little-endian, and that many bytes of one message. Neither side waits for the other to
read: what the socket does not take stays in a buffer.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec

from research_engine.engine.contract import TokenLogprobs
from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams


class Add(msgspec.Struct, array_like=True, tag="add", gc=False):
    """Serve a prompt.

    Attributes:
        key: number of the prompt, unique for the life of the connection.
        request_id: the engine's name for it, which errors and records carry.
        sampling: `encode_sampling` of its parameters.
        stream: whether text goes out as it comes, or all at once at the end.
        arrived: `time.perf_counter()` when its HTTP request came; on one machine all processes share that clock.
    """

    key: int
    request_id: str
    prompt: list[int]
    sampling: bytes
    stream: bool
    arrived: float
    priority: int = 0
    client: str = ""


class Abort(msgspec.Struct, array_like=True, tag="abort", gc=False):
    """End a prompt; nothing more is said about it."""

    key: int


class Embed(msgspec.Struct, array_like=True, tag="embed"):
    """Embed prompts; answered by Embedded or Refused."""

    key: int
    prompts: list[list[int]]


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine serves from now on.

    Attributes:
        clock_zero: `time.perf_counter()` at zero of the engine's clock.
        pid: of the engine process.
        embeds: whether it embeds; `generates`: whether it generates.
        config: what the engine resolved, by name: sizes of its cache, device, dtype.
    """

    clock_zero: float
    pid: int
    max_model_len: int
    vocab_size: int
    config: dict[str, Any]
    embeds: bool = False
    generates: bool = True


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot start or go on; its process ends.

    Attributes:
        mistake: the user's (an option, a model's name) rather than ours.
    """

    message: str
    mistake: bool = False


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """A prompt will not be served.

    Attributes:
        kind: "request" (it never could be), "length" (the same: its prompt is too long), "queue" (not now) or
            "engine" (a step failed).
    """

    key: int
    kind: str
    message: str


class Embedded(msgspec.Struct, array_like=True, tag="embedded"):
    """One vector a prompt, as little-endian float32."""

    key: int
    vectors: list[bytes]
    prompt_tokens: int


class Finish(msgspec.Struct, array_like=True):
    """How a continuation ended: reasons as in `CompletionOutput`, and what the prompt's cache hit saved."""

    reason: str
    stop_reason: str | int | None
    cached_tokens: int


class Delta(msgspec.Struct, array_like=True):
    """What is new of one continuation.

    Attributes:
        key: of its prompt; `index`: which of the n.
        token_ids, text: drawn since the last Delta; text lags while it could begin a stop string.
        logprobs: one entry a token, where asked for.
        prompt_logprobs: in the first Delta of continuation 0, where asked for.
        finish: in the last Delta.
    """

    key: int
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None


class StepSummary(msgspec.Struct, array_like=True, gc=False):
    """A step for the timeline; times on the engine's clock, in seconds."""

    step: int
    started: float
    finished: float
    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_requests: int


class Snapshot(msgspec.Struct):
    """Gauges, counters and histograms (bucket counts, the last of them unbounded; and the sum) since the start."""

    running: int
    waiting: int
    kv_utilization: float
    counters: dict[str, float]
    finished: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """What steps brought; the snapshot comes several times a second and whenever the engine falls idle."""

    deltas: list[Delta]
    steps: list[StepSummary]
    snapshot: Snapshot | None = None


ToEngine = Add | Abort | Embed
ToServer = Ready | Failed | Refused | Embedded | Progress
_SAMPLING_DEFAULTS = {entry.name: getattr(SamplingParams(), entry.name) for entry in fields(SamplingParams)}
_encoder = msgspec.msgpack.Encoder(enc_hook=dict)  # a mapping that is no dict, such as a request's logit_bias


def frame(message: ToEngine | ToServer) -> bytes:
    """One message as it goes over the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def frames(buffer: bytearray) -> Iterator[memoryview]:
    """The whole messages at the head of the buffer, which loses them when the iterator is exhausted."""
    at, view = 0, memoryview(buffer)
    try:
        while len(buffer) - at >= 4 and len(buffer) - at - 4 >= (size := int.from_bytes(view[at : at + 4], "little")):
            with view[at + 4 : at + 4 + size] as body:
                yield body
            at += 4 + size
    finally:
        view.release()
        del buffer[:at]


def encode_sampling(sampling: SamplingParams) -> bytes:
    """What differs from the defaults, so that most requests say little."""
    values = sampling.__dict__
    return _encoder.encode({name: values[name] for name, usual in _SAMPLING_DEFAULTS.items() if values[name] != usual})


@lru_cache(maxsize=1024)
def decode_sampling(encoded: bytes) -> SamplingParams:
    """The parameters again. Requests of one load share theirs, which are frozen."""
    values = msgspec.msgpack.decode(encoded, strict=False)
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**values)


class EngineEnd:
    """The engine process's end of the socket: takes what is there, sends what is taken, never waits unless asked to.

    Raises:
        EOFError: from `receive`, when the HTTP process is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout: float | None = 0.0) -> list[ToEngine]:
        """Messages that are there; waits for the first up to `timeout` seconds (None: as long as it takes).

        What waits to be sent goes out meanwhile.
        """
        while True:
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            events = self._poll.poll(None if timeout is None else 1000.0 * timeout)
            happened = events[0][1] if events else 0
            if happened & select.POLLOUT:
                self.flush()
            if happened & ~select.POLLOUT:
                break
            if not happened or timeout == 0.0:
                return []
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            if not data:
                raise EOFError("the HTTP process is gone")
            self._inbox += data
            if len(data) < 1 << 18:
                break
        return [self._decoder.decode(body) for body in frames(self._inbox)]

    def send(self, message: ToServer) -> None:
        self._outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the HTTP process is gone") from None

    def drain(self) -> None:
        """Send all of it, waiting for the other side; for last words."""
        self._socket.setblocking(True)
        rest, self._outbox = bytes(self._outbox), bytearray()
        self._socket.sendall(rest)
