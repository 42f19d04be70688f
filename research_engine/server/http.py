"""One HTTP request, as the endpoints see it: its body read and bounded, its answer whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from research_engine.server.errors import ApiError
from research_engine.server.limits import TRANSPORT

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers events would undo streaming
]
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Call:
    """A request and its answer.

    Attributes:
        request_id: the client's X-Request-Id, or one made here; goes back in the answer.
        body: once `read_body` has been called.
        arrived: `time.perf_counter()` when its headers were complete.
        writing_since: when the write in progress began; None while none is.
    """

    __slots__ = ("_receive", "_send", "_watcher", "arrived", "body", "request_id", "scope", "started", "writing_since")

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self.request_id = request_id
        self.arrived = time.perf_counter()
        self.body = b""
        self.started = False
        self.writing_since: float | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name (lower case)."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def read_body(self, limit: int) -> None:
        """Read the body into `self.body`.

        Raises:
            ApiError: 413, it has more than `limit` bytes.
            ClientGone: the connection was closed before its end.
        """
        announced = self.header(b"content-length")
        if announced is not None and int(announced) > limit:
            raise _too_large(limit, (b"connection", b"keep-alive"))
        message = await self._receive()
        parts, size = [], 0
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit, (b"connection", b"close"))
            parts.append(part)
            if not message.get("more_body", False):
                break
            message = await self._receive()
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    def on_disconnect(self, gone: Callable[[], None]) -> None:
        """Call `gone` should the client leave before the answer is complete; the body must have been read."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch(gone))

    async def _watch(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        gone()  # also comes once the answer is complete, when nothing is left to abort

    def cut(self) -> None:
        """Close the connection at once, whatever is still to be sent."""
        transport = self.scope.get(TRANSPORT)
        if transport is not None:
            transport.abort()

    def sender_with_id(self, send: Send) -> Send:
        """`send` for another application's answer, which gets the request's id."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.started = True
                named = (b"x-request-id", self.request_id.encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        return send_with_id

    async def reply(
        self, body: bytes, status: int = 200, content_type: bytes = b"application/json", headers: Headers = ()
    ) -> None:
        """Send the whole answer."""
        self.started = True
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", self.request_id.encode("latin-1")),
                *headers,
            ],
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Send the head of an answer that comes as server-sent events."""
        self.started = True
        headers = [*_EVENTS, (b"x-request-id", self.request_id.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: bytes) -> None:
        """Send events; waits while the client has not read what was sent before."""
        self.writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.writing_since = None

    async def end_events(self, events: bytes = DONE) -> None:
        """Send the last events and end the answer."""
        self.writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": events})
        self.writing_since = None


def _too_large(limit: int, *headers: tuple[bytes, bytes]) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=headers)
