"""The HTTP process's end of the engine: starts the process, hands requests over, deals out what comes back.

All of it runs in one event loop. A `Generation` holds what its reader has not taken yet, merged where it can be; a
reader too far behind is given up, so that memory stays bounded. A process that owes answers and says nothing is taken
for hung and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess

import msgspec

from research_engine.engine.sampling_params import SamplingParams
from research_engine.server import engine_process
from research_engine.server.engine_source import EngineSource
from research_engine.server.wire import (
    Abort,
    Add,
    Delta,
    Embed,
    Embedded,
    Failed,
    Progress,
    Ready,
    Refused,
    Snapshot,
    StepSummary,
    ToEngine,
    ToServer,
    encode_sampling,
    frame,
    frames,
)

log = logging.getLogger("research_engine.server")
STEPS_KEPT = 512
MAX_UNREAD = 262144  # numbers that wait for a reader: tokens, each with the log-probabilities beside it
_MERGE_FROM = 8  # unread deltas before they are merged
LOOKS = 8  # at a process, over the time that it may be silent
NOBODY = -1  # a key that no prompt has
_LAST_WORDS = 0.5  # seconds in which a hung process says where it hangs


class EngineStartError(ValueError):
    """The engine cannot start: an option, a model's name or a scheduler's parameter is wrong."""


class EngineDeadError(Exception):
    """The engine process is gone or could not start."""


class RefusedError(Exception):
    """The engine refuses a prompt; `kind` as in `wire.Refused`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Generation:
    """The answer to one HTTP request, of one or more prompts with n continuations each, as it comes.

    A context: whoever leaves it before its end leaves nothing behind in the engine. Choices are numbered prompt by
    prompt: prompt p's continuation i is choice p * n + i.
    """

    __slots__ = ("_client", "_error", "_first_key", "_n", "_pending", "_unread", "_waiter", "keys")

    def __init__(self, client: EngineClient, keys: range, n: int) -> None:
        self._client = client
        self._first_key, self._n = keys.start, n
        self.keys = dict.fromkeys(keys, n)  # key -> continuations still to end
        self._pending: list[Delta] = []
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.keys:
            self.abort()

    async def next(self) -> list[Delta]:
        """Deltas since the last call, at least one; an empty list once all continuations have ended.

        Raises:
            RefusedError: the engine refuses a prompt; the others are aborted.
            EngineDeadError: the engine process is gone.
            asyncio.CancelledError: `abort` was called.
        """
        while not self._pending and self._error is None and self.keys:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        pending, self._pending, self._unread = self._pending, [], 0
        return pending

    @property
    def has_ended(self) -> bool:
        """All continuations have ended and nothing is left to take."""
        return not self.keys and not self._pending

    def choice(self, delta: Delta) -> int:
        return (delta.key - self._first_key) * self._n + delta.index

    def abort(self, error: Exception | None = None) -> None:
        """End it, here and in the engine; whoever waits in `next` gets the error, RefusedError("gone") by default."""
        if self._error is None:
            self._error = error or RefusedError("gone", "the client is gone")
        self._client.forget(self)
        self._wake()

    def feed(self, delta: Delta) -> None:
        """Called by the client alone."""
        if delta.finish is not None:
            self.keys[delta.key] -= 1
            if not self.keys[delta.key]:
                del self.keys[delta.key]
        pending = self._pending
        self._unread += len(delta.token_ids) + sum(len(entry.top) + 1 for entry in delta.logprobs or ())
        if len(pending) < _MERGE_FROM or not self._merge(delta):
            pending.append(delta)
        if self._unread > MAX_UNREAD and self.keys:
            self.abort(RefusedError("slow", f"the client reads too slowly: {MAX_UNREAD} numbers wait for it"))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Called by the client alone."""
        self._error = self._error or error
        self._wake()

    def _merge(self, delta: Delta) -> bool:
        """Add to the latest unread delta of the same continuation."""
        for waiting in reversed(self._pending):
            if waiting.key == delta.key and waiting.index == delta.index:
                waiting.token_ids += delta.token_ids
                waiting.text += delta.text
                waiting.finish = delta.finish
                if waiting.logprobs is None:
                    waiting.logprobs = delta.logprobs
                elif delta.logprobs is not None:
                    waiting.logprobs += delta.logprobs
                return True
        return False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Silence:
    """Whether a process that owes answers has been silent for `LOOKS` whole intervals between looks at it.

    Looks count, not seconds: a machine that slept, or an event loop that was held up, is not blamed on the process.
    """

    def __init__(self) -> None:
        self._messages, self._looks = 0, 0

    def is_too_long(self, messages: int, *, owes: bool) -> bool:
        """Told at every look how many messages have come so far, and whether answers are owed."""
        self._looks = self._looks + 1 if owes and messages == self._messages else 0
        self._messages = messages
        return self._looks > LOOKS  # the work may have come just before the first of these looks


class EngineClient(asyncio.Protocol):
    """One engine process.

    Args:
        source: how the process makes its engine.
        on_death: called once, in the loop, when a process that served is gone without having been closed.
        step_timeout: seconds without a word from a process that has work, after which it is ended; 0: no limit.

    Attributes:
        ready: what the engine said of itself; None before and after.
        snapshot: its latest counts; steps: its latest 512 steps.
        is_stuck: the process cannot even be killed, as when a driver holds it.
    """

    def __init__(
        self, source: EngineSource, on_death: Callable[[], None] = lambda: None, step_timeout: float = 0.0
    ) -> None:
        self.source = source
        self.ready: Ready | None = None
        self.snapshot = Snapshot(0, 0, 0.0, {}, {}, {})
        self.steps: deque[StepSummary] = deque(maxlen=STEPS_KEPT)
        self.failure: str | None = None
        self.is_stuck = False
        self._on_death, self._step_timeout = on_death, step_timeout
        self._messages = 0  # heard so far
        self._watcher: asyncio.Task[None] | None = None
        self._live: dict[int, Generation] = {}
        self._embeddings: dict[int, asyncio.Future[Embedded]] = {}
        self._next_key = 0
        self._closing = False
        self._process: SpawnProcess | None = None
        self._transport: asyncio.Transport | None = None
        self._decoder = msgspec.msgpack.Decoder(ToServer)

    # Life of the process.

    async def start(self) -> Ready:
        """Start the process and wait until it serves.

        Raises:
            EngineStartError: the user's mistake, with the engine's words.
            EngineDeadError: it could not start for another reason.
        """
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=engine_process.main, args=(self.source, theirs, log.getEffectiveLevel()), name="engine"
        )
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._inbox = bytearray()
        process.start()
        self._process = process
        theirs.close()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        ready = await self._started
        if self._step_timeout:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return ready

    async def close(self, patience: float = 4.0) -> None:
        """End the process, if there is one: it goes with its connection, or is killed after `patience` seconds.

        One that lives on for as long again is left behind.
        """
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        if self._process is None or await self._has_ended(patience):
            return
        self._process.kill()
        self.is_stuck = not await self._has_ended(patience)
        if self.is_stuck:
            log.error("the engine process %d cannot be killed and is left behind", self._process.pid)

    async def _has_ended(self, patience: float) -> bool:
        """Whether the process ends within that many seconds."""
        assert self._process is not None
        deadline = time.monotonic() + patience
        while self._process.exitcode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._process.exitcode is not None

    async def _watch(self) -> None:
        """Lose a process that owes answers and says nothing for `step_timeout`, though it is asked at every look."""
        silence = Silence()
        while self.is_alive:
            await asyncio.sleep(self._step_timeout / LOOKS)
            if not self.is_alive:
                return
            owes = self.num_unanswered > 0
            if silence.is_too_long(self._messages, owes=owes):
                self._lose_hung()
                return
            if owes:
                self._send(Abort(NOBODY))  # one that does not hang answers with its state

    def _lose_hung(self) -> None:
        """Let a hung process say where it hangs, and kill it; its clients learn of it at once."""
        assert self._process is not None and self._process.pid is not None and self._transport is not None
        self.failure = f"a step did not end within {self._step_timeout:g} s (step_timeout)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)  # it writes every thread's stack, whatever holds the interpreter
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._process.kill)
        self._transport.abort()

    @property
    def is_alive(self) -> bool:
        return self.ready is not None

    @property
    def num_unanswered(self) -> int:
        """Prompts and batches to embed that have been handed over and for which the engine still owes something."""
        return len(self._live) + len(self._embeddings)

    # Requests.

    def generate(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        stream: bool,
        arrived: float,
        priority: int = 0,
        client: str = "",
    ) -> Generation:
        """Hand prompts over, which share their parameters.

        Args:
            arrived: `time.perf_counter()` when the request came; latencies count from it.

        Raises:
            EngineDeadError: there is no engine.
            OverflowError, UnicodeEncodeError: a value cannot be sent; nothing was handed over.
        """
        self._check_alive()
        encoded = encode_sampling(sampling)
        keys = range(self._next_key, self._next_key + len(prompts))
        adds = []
        for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            adds.append(frame(Add(key, name, prompt, encoded, stream, arrived, priority, client)))
        self._next_key = keys.stop
        generation = Generation(self, keys, sampling.n)
        self._live.update(dict.fromkeys(keys, generation))  # from here on the engine owes their ends
        self._write(b"".join(adds))
        return generation

    async def embed(self, prompts: list[list[int]]) -> Embedded:
        """Vectors of prompts.

        Raises:
            RefusedError, EngineDeadError: as `Generation.next`.
            OverflowError: a token id cannot be sent; nothing was handed over.
        """
        self._check_alive()
        key = self._next_key
        embed = frame(Embed(key, prompts))
        self._next_key += 1
        future: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        self._embeddings[key] = future
        self._write(embed)
        try:
            return await future
        finally:
            self._embeddings.pop(key, None)  # still there where its reader was cancelled

    def forget(self, generation: Generation) -> None:
        """Abort what is left of it in the engine."""
        for key in generation.keys:
            if self._live.pop(key, None) is not None and self.is_alive:
                self._send(Abort(key))
        generation.keys = {}

    def abort_all(self, error: Exception) -> None:
        """End every request with an error."""
        for generation in dict.fromkeys(self._live.values()):
            generation.abort(error)

    def _check_alive(self) -> None:
        if self.ready is None:
            raise EngineDeadError(self.failure or "the engine is not running")

    def _send(self, message: ToEngine) -> None:
        self._write(frame(message))

    def _write(self, framed: bytes) -> None:
        assert self._transport is not None
        self._transport.write(framed)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's, which has `write`

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        self._messages += 1
        for body in frames(self._inbox):
            self._take(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        served, self.ready = self.ready is not None, None
        if self._watcher is not None:
            self._watcher.cancel()
        self.failure = self.failure or "the engine process has died"
        error = EngineDeadError(self.failure)
        if not self._started.done():
            self._started.set_exception(error)
        for generation in dict.fromkeys(self._live.values()):
            generation.fail(error)
        self._live.clear()
        for future in self._embeddings.values():
            if not future.done():
                future.set_exception(error)
        self._embeddings.clear()
        if served and not self._closing:
            log.error("the engine process is gone: %s", self.failure)
            self._on_death()

    def _take(self, message: ToServer) -> None:
        if isinstance(message, Progress):
            live = self._live
            for delta in message.deltas:
                generation = live.get(delta.key)
                if generation is not None:
                    generation.feed(delta)
                    if delta.finish is not None and delta.key not in generation.keys:
                        live.pop(delta.key, None)
            self.steps.extend(message.steps)
            if message.snapshot is not None:
                self.snapshot = message.snapshot
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Embedded):
            future = self._embeddings.pop(message.key, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Ready):
            self.ready = message
            self._started.set_result(message)
        else:
            self._fail(message)

    def _refuse(self, message: Refused) -> None:
        error = RefusedError(message.kind, message.message)
        generation = self._live.pop(message.key, None)
        if generation is not None:
            generation.keys.pop(message.key, None)
            generation.abort(error)
        future = self._embeddings.pop(message.key, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _fail(self, message: Failed) -> None:
        self.failure = message.message
        if not self._started.done():
            kind = EngineStartError if message.mistake else EngineDeadError
            self._started.set_exception(kind(message.message))
