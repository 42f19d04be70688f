"""The ASGI application: who may ask, how much, and which endpoint answers.

Completions and the other POST endpoints read their bytes and write their answers themselves, for they carry the load;
the endpoints that only read are FastAPI's. Keys, limits, request ids and the shape of errors are the same for both.
"""

from __future__ import annotations

import difflib
import hmac
import importlib.util
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from research_engine import __version__
from research_engine.server.api.chat import chat_completions
from research_engine.server.api.completions import completions
from research_engine.server.api.embeddings import embeddings
from research_engine.server.api.schemas import describe_posts
from research_engine.server.api.status import status_router
from research_engine.server.api.tokens import detokenize, tokenize
from research_engine.server.context import ServerContext
from research_engine.server.errors import ApiError, nested_too_deeply
from research_engine.server.http import Call, ClientGone, Receive, Scope, Send

log = logging.getLogger("research_engine.server")

POSTS: dict[str, Callable[[ServerContext, Call], Awaitable[None]]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
_LONGEST_PATH = 100  # characters that are compared with those there are
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


@dataclass(frozen=True)
class Access:
    """Who may ask, and how much.

    Args:
        api_keys: any of which opens /v1, /tokenize, /detokenize, /tokenizer_info and /server_info; none leaves all
            of them open.
        protects_all: every path but /health needs a key.
        max_body_bytes: of a request.
        max_header_bytes: of a request's head.
    """

    api_keys: Sequence[str] = ()
    protects_all: bool = False
    max_body_bytes: int = 32 * 2**20
    max_header_bytes: int = 65536


class ServerApp:
    """The application of one context."""

    def __init__(self, context: ServerContext, access: Access, resolved: dict[str, Any] | None = None) -> None:
        self.context = context
        self._access = access
        self._keys = [key.encode() for key in access.api_keys]
        self._rest = _fastapi(context, resolved or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send, _request_id(scope))
        try:
            await self._answer(call, receive, send)
        except ApiError as error:
            await call.reply(error.body(), error.status, headers=error.headers)
        except ClientGone:
            pass
        except RecursionError:
            nested = nested_too_deeply()
            await call.reply(nested.body(), nested.status)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if call.started:
                call.cut()
            else:
                await call.reply(ApiError(500, "the server failed at this request", code="internal_error").body(), 500)

    async def _answer(self, call: Call, receive: Receive, send: Send) -> None:
        scope, access = call.scope, self._access
        path, method = scope["path"], scope["method"]
        self._check_head(scope)
        if self._keys and (access.protects_all or _guarded(path)) and path != "/health":
            self._check_key(call)
        handler = POSTS.get(path)
        if handler is None:
            await self._rest(scope, receive, call.sender_with_id(send))
            return
        if method != "POST":
            raise ApiError(405, f"{path} takes POST, not {method}", headers=[(b"allow", b"POST")])
        kind = call.header(b"content-type")
        if kind is None or kind.partition(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        await call.read_body(access.max_body_bytes)
        await handler(self.context, call)

    def _check_head(self, scope: Scope) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if size > self._access.max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self._access.max_header_bytes} bytes")

    def _check_key(self, call: Call) -> None:
        """Every key is compared in full, so that time tells nothing about any of them."""
        given = call.header(b"authorization") or b""
        scheme, _, key = given.partition(b" ")
        good = False
        for known in self._keys:
            good |= hmac.compare_digest(known, key.strip())
        if not (good and scheme.lower() == b"bearer"):
            raise ApiError(
                401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )  # fmt: skip


def _guarded(path: str) -> bool:
    return path.startswith("/v1") or path in ("/tokenize", "/detokenize", "/tokenizer_info", "/server_info")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value).decode("ascii")
    return uuid.uuid4().hex


def _fastapi(context: ServerContext, resolved: dict[str, Any]) -> FastAPI:
    app = FastAPI(title="research_engine", version=__version__)
    app.include_router(status_router(context, resolved))
    if importlib.util.find_spec("research_engine.server.page") is not None:
        app.include_router(importlib.import_module("research_engine.server.page").page_router())

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        told = str(error.detail)
        if error.status_code == 404:
            path = request.url.path
            near = difflib.get_close_matches(path[:_LONGEST_PATH], app.openapi()["paths"], n=1)
            told = f"there is no {path}" + (f"; nearest: {near[0]}" if near else "")
        return _response(ApiError(error.status_code, told), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return _response(ApiError(400, f"{field}: {first['msg']}", param=field))

    @app.exception_handler(ApiError)
    async def on_error(request: Request, error: ApiError) -> Response:
        return _response(error)

    usual = app.openapi

    def openapi() -> dict[str, Any]:
        return describe_posts(usual(), POSTS)

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending the document
    return app


def _response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    told = {**(headers or {}), **{name.decode(): value.decode() for name, value in error.headers}}
    return Response(error.body(), error.status, told, media_type="application/json")
