"""uvicorn's HTTP protocol with bounds on what a client may send before its request is known."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TRANSPORT = "research_engine.transport"
"""Where a request's scope has its connection, so that one whose client does not read can be cut."""


class BoundedProtocol(HttpToolsProtocol):
    """Head of a request bounded in bytes and in time."""

    max_header_bytes = 65536
    header_seconds = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.max_header_bytes:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._refuse, _TOO_SLOW)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope[TRANSPORT] = self.transport  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_ended()
        super().on_headers_complete()

    def _head_ended(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        self._head_ended()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
