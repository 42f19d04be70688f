"""Keys, limits and the endpoints that only read, on the application alone: no engine runs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from research_engine.loading.tokenizer import byte_tokenizer
from research_engine.options import EngineOptions
from research_engine.server.app import Access, ServerApp
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import EngineClient
from research_engine.server.engine_source import EngineSource
from research_engine.server.limits import BoundedProtocol


def ask(access: Access, method: str, path: str, **request: Any) -> httpx.Response:
    """One request to an application whose engine is not running."""
    context = ServerContext(EngineClient(EngineSource(EngineOptions("stub"))), byte_tokenizer(), ["stub"])

    async def run() -> httpx.Response:
        app = ServerApp(context, access, {"model": "stub"})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:  # type: ignore[arg-type]
            return await client.request(method, path, **request)

    return asyncio.run(run())


KEYED = Access(api_keys=["first", "second"])
PATHS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/server_info"), ("GET", "/tokenizer_info"),
    ("GET", "/v1/nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer first2"]
)
def test_without_a_right_key_the_answer_is_401(method: str, path: str, key: str | None) -> None:
    answer = ask(KEYED, method, path, json={}, headers={} if key is None else {"authorization": key})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "first" not in answer.text


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys_opens(key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        assert ask(KEYED, "GET", "/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200


def test_what_stays_open_with_a_key_and_what_does_not_when_all_is_protected() -> None:
    protected = Access(api_keys=["first"], protects_all=True)
    for path in ("/metrics", "/stats", "/version", "/docs", "/openapi.json"):
        assert ask(KEYED, "GET", path).status_code == 200
        assert ask(protected, "GET", path).status_code == 401
        assert ask(protected, "GET", path, headers={"authorization": "Bearer first"}).status_code == 200
    for access in (KEYED, protected):
        assert ask(access, "GET", "/health").status_code == 503  # open, and there is no engine


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert ask(KEYED, "GET", "/v1/models", headers={"authorization": "Bearer first"}).status_code == 200
    assert compared == [(b"first", b"first"), (b"second", b"first")]


def test_limits_of_body_and_head() -> None:
    small = Access(max_body_bytes=100, max_header_bytes=1000)
    body = {"prompt": "a" * 100}
    answer = ask(small, "POST", "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    for request in ({"headers": {"x-long": "a" * 1000}}, {"params": {"long": "a" * 1000}}):
        assert ask(small, "GET", "/version", **request).status_code == 431


def test_without_an_engine_requests_are_to_be_tried_again() -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        answer = ask(Access(), "POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert answer.headers["retry-after"] == "1"


def test_a_fault_of_the_servers_shows_no_trace(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def broken(context: ServerContext, call: Any) -> None:
        raise ZeroDivisionError("in /secret/path.py")

    monkeypatch.setitem(__import__("research_engine.server.app", fromlist=["POSTS"]).POSTS, "/v1/completions", broken)
    answer = ask(Access(), "POST", "/v1/completions", json={})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text and "Error" not in answer.text.replace("server_error", "")
    assert "ZeroDivisionError" in caplog.text


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def head_answer(pieces: list[bytes], seconds: float = 20.0) -> bytes:
    """What a connection answers to a request's head that comes in pieces and does not end."""
    import uvicorn
    from uvicorn.server import ServerState

    async def run() -> bytes:
        protocol = BoundedProtocol(uvicorn.Config(lambda: None, lifespan="off"), ServerState(), {})  # type: ignore[arg-type]
        protocol.max_header_bytes, protocol.header_seconds = 1000, seconds
        pipe = Pipe()
        protocol.connection_made(pipe)
        for piece in pieces:
            protocol.data_received(piece)
        while seconds < 1 and not pipe.closed:
            await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        return pipe.written

    return asyncio.run(run())


def test_a_head_without_end_is_refused_by_its_size() -> None:
    assert b" 431 " in head_answer([b"GET / HTTP/1.1\r\n", *(b"x-%d: %s\r\n" % (i, b"a" * 90) for i in range(20))])
    assert b" 431 " in head_answer([b"GET /", *(b"a" * 100 for _ in range(20))])
    assert head_answer([b"GET / HTTP/1.1\r\n", b"host: x\r\n"]) == b""


def test_a_head_that_takes_too_long_is_refused() -> None:
    assert b" 408 " in head_answer([b"GET / HTTP/1.1\r\n"], seconds=0.01)
