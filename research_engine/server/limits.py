"""uvicorn's HTTP protocol with bounds on what a client may send before its request is known."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TRANSPORT = "research_engine.transport"
"""Where a request's scope has its connection, so that one whose client does not read can be cut."""


log = logging.getLogger("research_engine.server")


class BoundedProtocol(HttpToolsProtocol):
    """A request's head is bounded in bytes and in time, its body in time, and so is what was sent and stays unread."""

    max_header_bytes = 65536
    header_seconds = 20.0
    client_seconds = 300.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.header_seconds, self._refuse, _TOO_SLOW)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_body and self._body_timer is None:  # most bodies are whole by now and need no timer
            self._body_timer = self.loop.call_later(self.client_seconds, self._refuse, _TOO_SLOW)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.max_header_bytes:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._refuse, _TOO_SLOW)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        self._body_ended()
        self._reads_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread_timer = self.loop.call_later(self.client_seconds, self._cut)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope[TRANSPORT] = self.transport  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._head_ended()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._body_ended()
        super().on_message_complete()

    def _head_ended(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _body_ended(self) -> None:
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _reads_again(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cut(self) -> None:
        log.warning("a client is cut: it has not read for %g s", self.client_seconds)
        self.transport.abort()

    def _refuse(self, answer: bytes) -> None:
        self._head_ended()
        self._body_ended()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()
