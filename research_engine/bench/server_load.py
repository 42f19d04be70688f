"""A closed-loop HTTP client that costs little, so that what it measures is the server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoadResult:
    """What a load came to.

    Attributes:
        requests: answered whole; `failed`: answered otherwise.
        events: server-sent events with text, when streamed.
        seconds: from the first request to the last answer.
        latencies: seconds from a request's scheduled time to the end of its answer.
    """

    requests: int = 0
    failed: int = 0
    events: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Of the latencies, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST."""
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(encoded)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + encoded


class _Connection(asyncio.Protocol):
    """One request after the other; an answer is whole by its length, or by the last chunk."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answered: asyncio.Future[bytes] | None = None
        self._end = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        self._received.clear()
        self._end = -1
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if self._end < 0 and (head := received.find(b"\r\n\r\n")) >= 0:
            lower = bytes(received[:head]).lower()
            at = lower.find(b"content-length:")
            self._end = head + 4 + int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        done = len(received) >= self._end if self._end > 0 else self._end == 0 and received.endswith(b"\r\n0\r\n\r\n")
        if done and self._answered is not None and not self._answered.done():
            self._answered.set_result(bytes(received))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the server closed the connection"))


async def _connections(port: int, number: int) -> list[_Connection]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(_Connection, "127.0.0.1", port))[1] for _ in range(number)]


def _note(result: LoadResult, answer: bytes, began: float) -> None:
    good = answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer
    result.requests += good
    result.failed += not good
    result.events += answer.count(b"data: {")
    result.latencies.append(time.perf_counter() - began)


async def closed_loop(port: int, request: bytes, *, connections: int, seconds: float) -> LoadResult:
    """Every connection asks again as soon as it has its answer."""
    result = LoadResult()
    start = time.perf_counter()

    async def ask_on(connection: _Connection) -> None:
        while (began := time.perf_counter()) < start + seconds:
            _note(result, await connection.ask(request), began)
        connection.close()

    await asyncio.gather(*map(ask_on, await _connections(port, connections)))
    result.seconds = time.perf_counter() - start
    return result


async def open_loop(port: int, request: bytes, *, connections: int, rate: float, seconds: float) -> LoadResult:
    """Requests at absolute times, `rate` a second, over connections that are there and in use before the first.

    Latency counts from the scheduled time, however late a request is sent.
    """
    result = LoadResult()
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    for connection in await _connections(port, connections):
        await connection.ask(request)  # the server takes connections as it comes to it: this one is taken
        free.put_nowait(connection)
    start, tasks = time.perf_counter(), set()

    async def ask(scheduled: float) -> None:
        connection = await free.get()
        _note(result, await connection.ask(request), scheduled)
        free.put_nowait(connection)

    for index in range(int(rate * seconds)):
        scheduled = start + index / rate
        if (left := scheduled - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        task = asyncio.ensure_future(ask(scheduled))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    result.seconds = time.perf_counter() - start
    while not free.empty():
        free.get_nowait().close()
    return result
