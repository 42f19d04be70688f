"""The HTTP client: connections are used again, and whatever a server does to one ends in an answer or a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from research_engine.bench.connection import ConnectionPool

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Collect:
    """A reader that keeps what it is told."""

    def __init__(self) -> None:
        self.status, self.body, self.times = 0, b"", []
        self.ended = asyncio.get_running_loop().create_future()

    def on_status(self, status, content_type):
        self.status = status

    def on_body(self, data, now):
        self.body += data
        self.times.append(now)

    def on_end(self, now):
        self.ended.set_result("end")

    def on_failure(self, why, now):
        self.ended.set_result(why)


async def served(serve: Serve, use):
    """`use(pool)` against a server whose connections `serve` looks after."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {"X-Test": "1"}, time.perf_counter)
    try:
        return await asyncio.wait_for(use(pool), 60)
    finally:
        await pool.close()
        server.close()


def run(serve: Serve, use):
    return asyncio.run(served(serve, use))


async def request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def get(pool: ConnectionPool) -> tuple[Collect, str]:
    reader = Collect()
    pool.send(pool.request("GET", "/x"), reader)
    return reader, await reader.ended


def answering(*answers: bytes) -> Serve:
    """Writes one answer a request, then closes."""

    async def serve(reader, writer):
        for answer in answers:
            try:
                await request(reader)
            except asyncio.IncompleteReadError:
                break
            writer.write(answer)
            await writer.drain()
        writer.close()

    return serve


def test_a_connection_is_used_again():
    async def use(pool):
        for _ in range(3):
            assert await pool.fetch("GET", "/x") == (200, b"ok")
        return pool.opened

    assert run(answering(OK, OK, OK), use) == 1


def test_requests_at_the_same_time_have_a_connection_each():
    async def use(pool):
        assert await asyncio.gather(*(pool.fetch("GET", "/x") for _ in range(3))) == [(200, b"ok")] * 3
        return pool.opened

    assert run(answering(OK), use) == 3


def test_a_connection_that_the_server_closes_between_requests_is_no_failure():
    async def use(pool):
        first = await pool.fetch("GET", "/x")
        second = await pool.fetch("GET", "/x")  # on the old connection, or on a new one if its end was seen before
        return first, second, pool.opened

    assert run(answering(OK), use) == ((200, b"ok"), (200, b"ok"), 2)


def test_a_server_that_says_close_is_believed():
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    async def use(pool):
        return [await pool.fetch("GET", "/x") for _ in range(2)], pool.opened

    assert run(answering(closing), use) == ([(200, b"ok")] * 2, 2)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", "closed before the answer ended"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "closed before the answer ended"),
        (b"", "closed before the answer ended"),
        (b"220 smtp ready\r\n", "no HTTP"),
    ],
)
def test_an_answer_cut_off_is_a_failure_that_says_so(answer, reason):
    async def use(pool):
        return (await get(pool))[1]

    assert reason in run(answering(answer), use)


def test_a_body_without_a_length_ends_with_the_connection():
    async def use(pool):
        return await pool.fetch("GET", "/x")

    assert run(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it"), use) == (200, b"all of it")


def test_the_body_comes_in_the_pieces_in_which_it_was_sent():
    async def serve(reader, writer):
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (b"2\r\nab\r\n", b"1\r\nc\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.05)  # so that each is a read of its own; together they would be one time, too
        writer.write(b"0\r\n\r\n")

    async def use(pool):
        reader, end = await get(pool)
        return reader.body, end, sorted(reader.times) == reader.times

    assert run(serve, use) == (b"abc", "end", True)


def test_no_server_is_a_failure_that_names_the_address():
    async def use():
        pool = ConnectionPool("http://127.0.0.1:1", {}, time.perf_counter)
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            await pool.fetch("GET", "/x")

    asyncio.run(use())


def test_a_request_given_up_closes_its_connection_and_hears_nothing_more():
    async def use_of(gone: asyncio.Event):
        async def serve(reader, writer):
            await request(reader)
            await reader.read()  # until the client hangs up
            gone.set()

        async def use(pool):
            reader = Collect()
            pool.send(pool.request("GET", "/x"), reader)
            while not pool.opened:
                await asyncio.sleep(0.001)
            pool.cancel(reader)
            await gone.wait()
            return reader.ended.done()

        return await served(serve, use)

    async def main():
        return await use_of(asyncio.Event())

    assert asyncio.run(main()) is False


def test_an_answer_that_does_not_come_is_a_time_out():
    async def serve(reader, writer):
        await reader.read()

    async def use(pool):
        with pytest.raises(TimeoutError, match="0.05 s"):
            await pool.fetch("GET", "/x", timeout=0.05)

    run(serve, use)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="base_url"):
        ConnectionPool(url, {}, time.perf_counter)


def test_headers_cannot_smuggle_in_a_request():
    with pytest.raises(ValueError, match="line breaks"):
        ConnectionPool("http://host", {"X": "1\r\nY: 2"}, time.perf_counter)


def test_a_request_has_its_headers_and_the_length_of_its_body():
    pool = ConnectionPool("http://host:81/prefix/", {"Authorization": "Bearer k"}, time.perf_counter)
    head, _, body = pool.request("POST", "/v1/x", b"{}", {"x-request-id": "7"}).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /prefix/v1/x HTTP/1.1"
    assert {"Host: host:81", "Authorization: Bearer k", "x-request-id: 7", "Content-Length: 2"} <= set(lines)
    assert body == b"{}"
