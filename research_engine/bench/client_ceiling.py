"""`research-engine bench client`: how much load the load generator makes and reads, against a server that does nothing.

The server, in a process of its own, gives every stream one token a step, all streams in one burst, as an engine does.
A step has a pause, so that tokens are read one by one; what they cost the client says how many a core could take.
Without a pause (--step-ms 0) several tokens of a stream are read at once, which is cheaper than with a real server.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, cast

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from research_engine.bench.backends import request_body
from research_engine.bench.connection import ConnectionPool
from research_engine.bench.datasets import Sample
from research_engine.bench.event_loop import run_fast
from research_engine.bench.load import Load, LoadDriver, LoadRun

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'  # noqa: E501  # as vLLM sends it
_END = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True)
class ClientBenchOptions:
    """What to send.

    Args:
        streams: requests under way, one measurement each.
        output_len: tokens of an answer.
        seconds: of a measurement, roughly.
        step_ms: pause of the server between steps.
    """

    streams: tuple[int, ...] = (16, 64, 256)
    output_len: int = 128
    seconds: float = 3.0
    step_ms: float = 4.0

    def __post_init__(self) -> None:
        if min((*self.streams, self.output_len)) < 1 or not self.streams:
            raise ValueError(f"streams = {self.streams}, output_len = {self.output_len}: must be >= 1")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds = {self.seconds}: must be finite and > 0")
        if not 0 <= self.step_ms < math.inf:
            raise ValueError(f"step_ms = {self.step_ms}: must be finite and >= 0")


@dataclass(frozen=True)
class Ceiling:
    """One measurement: tokens and requests a second, the share of a core that the client took, and its time a token."""

    kind: str
    streams: int
    tokens: float
    requests: float
    cpu_share: float
    microseconds: float

    @property
    def of_a_core(self) -> str:
        """What a client that had nothing but this to do would take."""
        if self.kind == "whole":
            return f"{self.requests / self.cpu_share / 1000:.3g}k req/s"
        return f"{1000 / self.microseconds:.3g}k tok/s"


def main(options: Annotated[ClientBenchOptions, tyro.conf.arg(name="")]) -> int:
    """How many streamed tokens and requests a second bench serve can take on this machine.

    Args:
        options: what to send.
    """
    table = Table(
        box=SIMPLE,
        title=f"answers of {options.output_len} tokens, from a server that does nothing",
        title_justify="left",
    )
    for name in ("answers", "under way", "tokens/s", "requests/s", "CPU", "us/token", "a core takes"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for ceiling in measure(options):
        table.add_row(
            ceiling.kind,
            str(ceiling.streams),
            f"{ceiling.tokens:,.0f}",
            f"{ceiling.requests:,.0f}",
            f"{ceiling.cpu_share:.0%}",
            f"{ceiling.microseconds:.1f}",
            ceiling.of_a_core,
        )
    Console().print(table)
    return 0


def measure(options: ClientBenchOptions) -> list[Ceiling]:
    """Streams of `output_len` tokens, whole answers of as many, and, as a baseline, the streams read by aiohttp."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(
        target=serve_tokens, args=(theirs, options.output_len, options.step_ms / 1000), daemon=True
    )
    server.start()
    try:
        port = ours.recv()
        found = [
            run_fast(_measure(port, streams, streamed, options))
            for streamed in (True, False)
            for streams in options.streams
        ]
        return [*found, *(run_fast(_measure_aiohttp(port, streams, options)) for streams in options.streams)]
    finally:
        ours.close()  # tells the server to end
        server.join(10)
        server.kill()


async def _measure(port: int, streams: int, streamed: bool, options: ClientBenchOptions) -> Ceiling:
    pool = ConnectionPool(f"http://127.0.0.1:{port}", {}, time.perf_counter)
    try:
        first = await _drive(pool, streams, streamed, 4 * streams, options.output_len)  # also opens the connections
        rate = 4 * streams / max(first.end - first.start, 1e-6)
        count = max(streams, min(200_000, int(rate * options.seconds)))
        run = await _drive(pool, streams, streamed, count, options.output_len)
    finally:
        await pool.close()
    failed = [seen.error for seen in run.observations if not seen.is_completed]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    wall = run.end - run.start
    tokens = sum(len(seen.times) if streamed else options.output_len for seen in run.observations)
    kind = "streamed" if streamed else "whole"
    return Ceiling(kind, streams, tokens / wall, count / wall, run.cpu_seconds / wall, 1e6 * run.cpu_seconds / tokens)


async def _measure_aiohttp(port: int, streams: int, options: ClientBenchOptions) -> Ceiling:
    """The usual way to read a stream: aiohttp's chunks, one task a request, nothing done with the bytes."""
    import aiohttp

    body = request_body("openai", Sample("hello", 1, options.output_len), model="m", streamed=True, ignore_eos=True,
                        extra={})  # fmt: skip
    tokens = requests = 0

    async def read(session: aiohttp.ClientSession, until: float) -> None:
        nonlocal tokens, requests
        while time.perf_counter() < until:
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=body) as response:
                async for data in response.content.iter_any():
                    tokens += data.count(b'"text":" word"')
            requests += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(read(session, 0.0) for _ in range(streams)))
        begin, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(read(session, begin + options.seconds) for _ in range(streams)))
        wall, used = time.perf_counter() - begin, time.process_time() - cpu
    return Ceiling("aiohttp", streams, tokens / wall, requests / wall, used / wall, 1e6 * used / max(tokens, 1))


async def _drive(pool: ConnectionPool, streams: int, streamed: bool, count: int, length: int) -> LoadRun:
    sample = Sample("hello", 1, length)
    body = request_body("openai", sample, model="m", streamed=streamed, ignore_eos=True, extra={})
    request = pool.request("POST", "/v1/completions", body)
    return await LoadDriver(pool, Load([sample] * count, [request] * count, None, streamed, streams)).run()


def serve_tokens(parent: Connection, length: int, step: float) -> None:
    """The server: tells its port to the parent, and ends when the parent does."""
    run_fast(_serve(parent, length, step))


async def _serve(parent: Connection, length: int, step: float) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[_Answerer, int] = {}  # connection -> tokens still to be sent
    server = await loop.create_server(lambda: _Answerer(streams, length), "127.0.0.1", 0, backlog=4096)
    parent.send(server.sockets[0].getsockname()[1])
    gone = asyncio.Event()
    loop.add_reader(parent.fileno(), gone.set)
    while not gone.is_set():
        for answerer, left in list(streams.items()):
            answerer.send_token(left)
        await asyncio.sleep(step if streams else max(step, 0.0005))
    server.close()


class _Answerer(asyncio.Protocol):
    """Knows nothing of HTTP but where a request of one write ends, and whether it asks for a stream."""

    def __init__(self, streams: dict[_Answerer, int], length: int) -> None:
        self._streams, self._length = streams, length
        self._transport: asyncio.Transport | None = None
        usage = b'"usage":{"prompt_tokens":1,"completion_tokens":%d}' % length
        whole = b'{"choices":[{"index":0,"text":"%s","finish_reason":"length"}],%s}' % (b" word" * length, usage)
        self._whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(whole)
        self._whole += whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if b'"stream":true' in data:
            self._transport.write(_HEAD)
            self._streams[self] = self._length
        else:
            self._transport.write(self._whole)

    def send_token(self, left: int) -> None:
        assert self._transport is not None
        self._transport.write(_chunk(_TOKEN if left > 1 else _TOKEN + _END) + (b"0\r\n\r\n" if left <= 1 else b""))
        if left <= 1:
            del self._streams[self]
        else:
            self._streams[self] = left - 1


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
