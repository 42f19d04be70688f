"""HTTP/1.1 for a load generator: a response's bytes reach their reader in the call that took them off the socket.

There is no task, queue or buffer between the socket and the reader, so a streamed token costs one pass through the
parser (llhttp, as `httptools` wraps it) and its time is that of the read. Connections are kept alive and used again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

Clock = Callable[[], float]


class Reader(Protocol):
    """Takes one response as it comes; exactly one of the last two is called. `now`: the clock when bytes were read."""

    def on_status(self, status: int, content_type: str) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...

    def on_end(self, now: float) -> None: ...

    def on_failure(self, why: str, now: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One connection; at most one request is under way on it."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._request = b""
        self._now = 0.0
        self._answered = False  # a byte of the response was read
        self._in_body = self._sized = False
        self._content_type = b""
        self._used = 0
        self.is_lost = False
        self.transport: asyncio.Transport | None = None

    def send(self, request: bytes, reader: Reader) -> None:
        assert self.transport is not None and self._reader is None
        self._reader, self._request = reader, request
        self._answered = self._in_body = self._sized = False
        self._content_type = b""
        self._used += 1
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's

    def data_received(self, data: bytes) -> None:
        self._now = self._pool.clock()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of a reader, not the server's
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self.is_lost = True
        reader = self._reader
        if reader is None:
            return
        self._now = self._pool.clock()
        if not self._answered and self._used > 1:  # closed while idle, as servers do: it never saw the request
            self._reader = None
            self._pool.resend(self._request, reader)
        elif self._in_body and not self._sized:  # a body without a length ends with its connection
            self._reader = None
            reader.on_end(self._now)
        else:
            why = f" ({error})" if error is not None else ""
            self._fail(f"the connection was closed before the answer ended{why}")

    def abort(self) -> None:
        """Drop the connection; its reader hears nothing more."""
        self._reader = None
        if self.transport is not None:
            self.transport.abort()

    def serves(self, reader: Reader) -> bool:
        return self._reader is reader

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._reader is not None:
            self._reader.on_status(self._parser.get_status_code(), self._content_type.decode("latin-1"))

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.on_body(body, self._now)

    def on_message_complete(self) -> None:
        reader, self._reader = self._reader, None
        self._request = b""
        if self._parser.should_keep_alive() and reader is not None:
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()
        if reader is not None:
            reader.on_end(self._now)

    def _fail(self, why: str) -> None:
        reader = self._reader
        self.abort()
        if reader is not None:
            reader.on_failure(why, self._now)


class ConnectionPool:
    """Connections to one server.

    Args:
        base_url: http:// or https://, host, port and a path that goes before every other.
        headers: sent with every request.
        clock: seconds, for the readers' times.
        verify: check the certificate of an https server.

    Attributes:
        path: of base_url, without a trailing slash.
        opened: connections made so far. resent: requests sent again because the server had closed an idle connection.

    Raises:
        ValueError: base_url is none, or a header holds a line break.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Clock, *, verify: bool = True) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url = {base_url!r}: must be like http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"base_url = {base_url!r}: {error}") from None
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._ssl = ssl.create_default_context()
            if not verify:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        self.path = parts.path.rstrip("/")
        self.clock = clock
        self.opened = self.resent = 0
        host = f"[{self._host}]" if ":" in self._host else self._host
        every = {"Host": f"{host}:{self._port}", "User-Agent": "research_engine", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in every.items() if _header(name, value))
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: dict[asyncio.Task[None], Reader] = {}

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a request, so that they can be made beforehand."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items() if _header(name, value))
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self.path}{path} HTTP/1.1\r\n{self._head}{extra}{kind}\r\n".encode() + body

    def send(self, request: bytes, reader: Reader) -> None:
        """Send a request now, on an idle connection or on a new one. Failures go to the reader."""
        if self._idle:
            self._idle.pop().send(request, reader)  # the one used last: its window is open, and others may time out
        else:
            task = asyncio.get_running_loop().create_task(self._open(request, reader))
            self._opening[task] = reader
            task.add_done_callback(self._opening.pop)

    def resend(self, request: bytes, reader: Reader) -> None:
        self.resent += 1
        self.send(request, reader)

    async def fetch(self, method: str, path: str, body: bytes = b"", *, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and whole body of one answer.

        Raises:
            OSError: no connection, or the answer is not whole.
            TimeoutError: none within `timeout` seconds.
        """
        whole = _Whole(asyncio.get_running_loop().create_future())
        self.send(self.request(method, path, body), whole)
        try:
            return await asyncio.wait_for(whole.future, timeout)
        except asyncio.TimeoutError:
            self.cancel(whole)
            raise TimeoutError(f"{self.path}{path}: no answer within {timeout:g} s") from None

    def cancel(self, reader: Reader) -> None:
        """Give a request up: its connection is closed, which tells the server, and its reader hears nothing more."""
        for connection in self._all:
            if connection.serves(reader):
                connection.abort()
                return
        for task, waiting in self._opening.items():
            if waiting is reader:
                task.cancel()
                return

    async def close(self) -> None:
        """Close every connection; readers under way hear nothing more."""
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        for connection in list(self._all):
            connection.abort()
        if opening:
            await asyncio.wait(opening)
        await asyncio.sleep(0)  # lets transports say goodbye before the loop ends

    def give_back(self, connection: _Connection) -> None:
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _open(self, request: bytes, reader: Reader) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            reader.on_failure(f"no connection to {self._host}:{self._port}: {error}", self.clock())
            return
        self.opened += 1
        if connection.is_lost:
            reader.on_failure("the connection was closed as soon as it was open", self.clock())
            return
        self._all.add(connection)
        connection.send(request, reader)


class _Whole:
    """Keeps a whole answer for `fetch`."""

    def __init__(self, future: asyncio.Future[tuple[int, bytes]]) -> None:
        self.future = future
        self._status, self._parts = 0, bytearray()

    def on_status(self, status: int, content_type: str) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._parts += data

    def on_end(self, now: float) -> None:
        self._set(self._status, bytes(self._parts))

    def on_failure(self, why: str, now: float) -> None:
        if not self.future.done():
            self.future.set_exception(OSError(why))

    def _set(self, *answer: Any) -> None:
        if not self.future.done():
            self.future.set_result(answer)


def _header(name: str, value: str) -> bool:
    if not name or any(character in name + value for character in "\r\n\0") or ":" in name:
        raise ValueError(f"header {name!r}: a name without ':' and a value without line breaks")
    return True
