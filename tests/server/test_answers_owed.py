"""Every prompt that is handed to the engine is given up again: once it has ended, however it ends, nothing is owed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research_engine.engine.contract import Request, Scheduler
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.options import EngineOptions
from research_engine.server import engine_client, engine_process
from research_engine.server.api.completions import completions
from research_engine.server.api.embeddings import embeddings
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import EngineClient, EngineDeadError, Generation, RefusedError
from research_engine.server.engine_process import EngineLoop
from research_engine.server.engine_source import EngineParts, EngineSource
from research_engine.server.errors import ApiError
from research_engine.server.http import Call
from research_engine.server.live_records import LiveRecords
from research_engine.server.stub_engine import stub_parts
from research_engine.server.wire import (
    Abort,
    Add,
    Delta,
    Embed,
    Embedded,
    EngineEnd,
    Finish,
    Progress,
    Ready,
    Refused,
    ToEngine,
    ToServer,
    encode_sampling,
    frame,
    frames,
)
from schedulers.chunked_prefill import ChunkedPrefill
from tests.server.live import LiveServer

TOO_LONG = 2**70  # JSON has such integers, the wire has not


class Wire:
    """An engine that is the test's: keeps what it was told, says what the test wants said."""

    def __init__(self) -> None:
        self.client = EngineClient(EngineSource(EngineOptions("stub")))
        self.told: list[ToEngine] = []
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def connect(self) -> Wire:
        """Within a running loop."""
        self.client._started = asyncio.get_running_loop().create_future()
        self.client._inbox = bytearray()
        self.client.connection_made(self)  # type: ignore[arg-type]
        self.say(Ready(0.0, 1, 100, 0, {}, embeds=True))
        return self

    def write(self, data: bytes) -> None:
        """The transport's."""
        self.told += [self._decoder.decode(body) for body in frames(bytearray(data))]

    def say(self, message: ToServer) -> None:
        self.client.data_received(frame(message))

    def end(self, key: int, index: int = 0) -> None:
        """A continuation ends."""
        self.say(Progress([Delta(key, index, [1], "a", finish=Finish("length", None, 0))], []))

    @property
    def owed(self) -> set[int]:
        """Keys of prompts that the client takes to be owed."""
        return set(self.client._live)

    def generate(self, prompts: int = 1, n: int = 1, **fields: Any) -> Generation:
        return self.client.generate(
            "r", [[1]] * prompts, SamplingParams(n=n, max_tokens=5), stream=True, arrived=0.0, **fields
        )


@pytest.mark.parametrize(
    ("prompts", "fields"),
    [([[1]], {"priority": TOO_LONG}), ([[1], [2]], {"priority": -TOO_LONG}), ([[1], [2], [TOO_LONG]], {}),
     ([[1]], {"client": "\ud800"})],
    ids=["a priority", "of two prompts", "the third prompt's token", "a user's name"],
)  # fmt: skip
def test_what_cannot_be_sent_is_not_handed_over_in_part(prompts: list[list[int]], fields: dict[str, Any]) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        with pytest.raises((OverflowError, UnicodeEncodeError)):
            wire.client.generate("r", prompts, SamplingParams(), stream=False, arrived=0.0, **fields)
        assert wire.client.num_unanswered == 0 and not wire.told

    asyncio.run(scene())


def test_a_text_to_embed_that_cannot_be_sent_is_not_handed_over() -> None:
    async def scene() -> None:
        wire = Wire().connect()
        with pytest.raises(OverflowError):
            await wire.client.embed([[1], [TOO_LONG]])
        assert wire.client.num_unanswered == 0 and not wire.told

    asyncio.run(scene())


def test_a_token_to_embed_beyond_64_bits_is_the_clients_mistake_where_the_vocabulary_is_unknown() -> None:
    async def scene() -> None:
        call = Call({"type": "http", "headers": []}, forever, broken, "id")
        call.body = json.dumps({"input": [TOO_LONG]}).encode()
        with pytest.raises(ApiError, match="64 bits") as refused:
            await embeddings(ServerContext(Wire().connect().client, None, ["m"]), call)
        assert refused.value.status == 400

    asyncio.run(scene())


def ended(wire: Wire, generation: Generation) -> None:
    for key in list(generation.keys):
        wire.end(key, 1)
        wire.end(key, 0)


def one_refused(wire: Wire, generation: Generation) -> None:
    wire.say(Refused(list(generation.keys)[1], "request", "no"))


def refused_after_an_end(wire: Wire, generation: Generation) -> None:
    keys = list(generation.keys)
    wire.end(keys[0], 0)
    wire.end(keys[0], 1)
    wire.end(keys[1], 1)
    wire.say(Refused(keys[1], "engine", "a step failed"))


def left(wire: Wire, generation: Generation) -> None:
    generation.abort()


def left_twice_and_answered_all_the_same(wire: Wire, generation: Generation) -> None:
    keys = list(generation.keys)
    generation.abort()
    generation.abort()
    for key in keys:
        wire.end(key, 0)
        wire.end(key, 1)
    wire.say(Refused(keys[0], "queue", "full"))


def too_slow(wire: Wire, generation: Generation) -> None:
    key = next(iter(generation.keys))
    wire.say(Progress([Delta(key, 0, [1] * (engine_client.MAX_UNREAD + 1), "")], []))


def too_slow_at_an_end(wire: Wire, generation: Generation) -> None:
    key = next(iter(generation.keys))
    wire.end(key, 0)
    tokens = [1] * (engine_client.MAX_UNREAD + 1)
    wire.say(Progress([Delta(key, 1, tokens, "", finish=Finish("stop", None, 0)), Delta(key + 1, 0, [1], "")], []))


def failed_within(wire: Wire, generation: Generation) -> None:
    with pytest.raises(ZeroDivisionError), generation:
        raise ZeroDivisionError


def engine_gone(wire: Wire, generation: Generation) -> None:
    wire.client.connection_lost(None)


def server_ends(wire: Wire, generation: Generation) -> None:
    wire.client.abort_all(RefusedError("shutdown", "it ends"))


ENDS = [
    ended, one_refused, refused_after_an_end, left, left_twice_and_answered_all_the_same, too_slow, too_slow_at_an_end,
    failed_within, engine_gone, server_ends,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_however_a_generation_ends_nothing_is_owed_any_more(end: Callable[[Wire, Generation], None]) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        generation = wire.generate(prompts=3, n=2)
        assert wire.client.num_unanswered == 3
        end(wire, generation)
        assert wire.client.num_unanswered == 0

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["answered", "refused", "cancelled", "engine gone"])
def test_however_an_embedding_ends_nothing_is_owed_any_more(how: str) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        task = asyncio.create_task(wire.client.embed([[1], [2]]))
        await asyncio.sleep(0)
        (told,) = wire.told
        assert isinstance(told, Embed) and wire.client.num_unanswered == 1
        if how == "answered":
            wire.say(Embedded(told.key, [b"", b""], 2))
        elif how == "refused":
            wire.say(Refused(told.key, "request", "no"))
        elif how == "cancelled":
            task.cancel()
        else:
            wire.client.connection_lost(None)
        with contextlib.suppress(RefusedError, EngineDeadError, asyncio.CancelledError):
            await task
        assert wire.client.num_unanswered == 0
        wire.say(Embedded(told.key, [b"", b""], 2))  # an answer that nobody waits for

    asyncio.run(scene())


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "refuse", "leave"]), st.integers(0, 99)), max_size=40))
def test_what_is_owed_is_what_the_engine_was_told_and_has_not_ended(events: list[tuple[str, int]]) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        generations: list[Generation] = []
        live: dict[int, set[int]] = {}  # the engine's account: key -> continuations that go on
        for what, number in events:
            keys = sorted(live)
            if what == "add":
                generations.append(wire.generate(prompts=1 + number % 3, n=1 + number % 2))
            elif what == "leave" and generations:
                generations[number % len(generations)].abort()
            elif what == "refuse" and keys:
                key = keys[number % len(keys)]
                del live[key]
                wire.say(Refused(key, "engine", "no"))
            elif what == "end" and keys:
                key = keys[number % len(keys)]
                index = live[key].pop()
                if not live[key]:
                    del live[key]
                wire.end(key, index)
            for message in wire.told:
                if isinstance(message, Add):
                    live[message.key] = set(range(generations[-1]._n))
                elif isinstance(message, Abort):
                    live.pop(message.key, None)
            wire.told.clear()
            assert wire.owed == set(live)

    asyncio.run(scene())


async def forever() -> Any:
    """A client that never leaves by itself."""
    await asyncio.Event().wait()


async def broken(message: Any) -> None:
    raise OSError("the connection is lost")


class Asked:
    """A completion on its way through the endpoint, with a client of the test's."""

    def __init__(self, wire: Wire, send: Callable[[Any], Awaitable[None]], **fields: Any) -> None:
        self.call = Call({"type": "http", "headers": []}, forever, send, "id")
        self.call.body = json.dumps({"prompt": [1], **fields}).encode()
        wire.client.ready = Ready(0.0, 1, 100, 0, {}, embeds=False)
        self.task = asyncio.create_task(completions(ServerContext(wire.client, None, ["m"]), self.call))

    async def until_handed_over(self, wire: Wire) -> int:
        while not wire.told:
            assert not self.task.done(), self.task
            await asyncio.sleep(0)
        (told,) = wire.told
        assert isinstance(told, Add)
        return told.key


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_cancelled_leaves_nothing_in_the_engine(stream: bool) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        asked = Asked(wire, broken, stream=stream)
        key = await asked.until_handed_over(wire)
        asked.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked.task
        assert wire.client.num_unanswered == 0 and wire.told[1:] == [Abort(key)]

    asyncio.run(scene())


def test_an_answer_that_cannot_be_sent_leaves_nothing_in_the_engine() -> None:
    async def scene() -> None:
        wire = Wire().connect()
        asked = Asked(wire, broken, stream=True)
        key = await asked.until_handed_over(wire)
        wire.say(Progress([Delta(key, 0, [1], "a")], []))
        with pytest.raises(OSError, match="the connection is lost"):
            await asked.task
        assert wire.client.num_unanswered == 0 and wire.told[1:] == [Abort(key)]

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_one_continuation_that_is_not_served_takes_the_others_with_it(stream: bool) -> None:
    async def scene() -> None:
        wire = Wire().connect()
        asked = Asked(wire, broken, stream=stream, prompt=[[1], [2]])
        while not wire.told:
            await asyncio.sleep(0)
        first, second = (told.key for told in wire.told)
        wire.say(Progress([Delta(first, 0, [1], "a", finish=Finish("error", None, 0))], []))
        if not stream:  # which waits for all of them
            wire.end(second)
        with pytest.raises(Exception, match="could not be kept to its form"):
            await asked.task
        assert wire.client.num_unanswered == 0

    asyncio.run(scene())


# The engine's end.


class Ears(ChunkedPrefill):
    """A policy that fails at whatever it hears of a request."""

    def on_arrival(self, request: Request) -> None:
        raise ZeroDivisionError

    on_finish = on_arrival


class Served:
    """An engine's loop, turned by hand, and what it says."""

    def __init__(self, *, overlap: bool = False, scheduler: Scheduler | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        records = LiveRecords()
        usual = stub_parts(EngineOptions("stub"), records).engine
        config = replace(usual.config, overlap=overlap)
        self.engine = Engine(config, scheduler or usual.scheduler, usual.executor, records=records)
        self._loop = EngineLoop(EngineParts(self.engine), records, EngineEnd(theirs))

    def add(self, key: int, **sampling: Any) -> None:
        encoded = encode_sampling(SamplingParams(**sampling))
        self._loop._take(Add(key, f"r{key}", [1, 2], encoded, False, 0.0))

    def serve(self) -> None:
        """Until the engine has no work."""
        while self.engine.has_unfinished:
            self._loop._step()

    def said(self) -> list[ToServer]:
        decoder, inbox = msgspec.msgpack.Decoder(ToServer), bytearray(self._socket.recv(1 << 20))
        return [decoder.decode(body) for body in frames(inbox)]


def test_the_end_is_told_though_the_state_is_told_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties need the tokens before: to look at such an engine as a policy does lets out those under way."""
    monkeypatch.setattr(engine_process, "_SNAPSHOT_SECONDS", -1.0)  # after every step
    served = Served(overlap=True)
    served.add(7, presence_penalty=1.0, stop_token_ids=[ord("b")], max_tokens=9)
    served.serve()
    deltas = [delta for message in served.said() if isinstance(message, Progress) for delta in message.deltas]
    assert [(delta.key, delta.token_ids) for delta in deltas] == [(7, [ord("a"), ord("b")])]
    assert deltas[0].finish is not None and deltas[0].finish.reason == "stop"


def test_a_policy_that_fails_at_an_arrival_and_at_its_end_costs_that_request_alone() -> None:
    served = Served(scheduler=Ears())
    for key in (1, 2):
        served.add(key)
        (refused,) = served.said()
        assert isinstance(refused, Refused) and (refused.key, refused.kind) == (key, "engine")
        assert not served.engine.has_unfinished


# Over HTTP.


@pytest.mark.parametrize(
    "body",
    [{"prompt": "a", "priority": TOO_LONG}, {"prompt": ["a", "b"], "priority": -TOO_LONG, "stream": True},
     {"prompt": "a", "n": 2, "priority": TOO_LONG}],
)  # fmt: skip
def test_a_number_beyond_64_bits_is_refused_and_owed_to_nobody(stub: LiveServer, body: dict[str, Any]) -> None:
    answer = stub.post("/v1/completions", body)
    assert (answer.status == 400 and "64 bits" in answer.error["message"]) or answer.status == 400
    stub.wait_until_quiet()
