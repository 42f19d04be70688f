"""A small OpenAI-compatible server whose answers, their timing and their faults a test writes down beforehand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

METRICS = """# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{model_name="stand-in"}} {preemptions}
"""


@dataclass
class Reply:
    """How a request is answered.

    Attributes:
        chunks: texts, one event each; `Reply.of(n)` gives n of one token.
        tokens: what usage says; the number of chunks when None.
        gaps: seconds before each chunk; 0 where the list is shorter.
        usage: send a usage chunk when it is asked for.
        finish: send the finish reason; `finish_reason` is it.
        status: an HTTP error instead of an answer.
        cut_after: close the connection after so many chunks.
        event: raw bytes sent in place of chunk 1 (an error, nonsense).
        until: wait for this before the first chunk.
        pieces: raw bytes of the whole stream, written one by one, in place of everything else.
    """

    chunks: Sequence[str] = ("a", "b", "c", "d")
    tokens: int | None = None
    gaps: Sequence[float] = ()
    usage: bool = True
    finish: bool = True
    finish_reason: str = "length"
    status: int = 200
    cut_after: int | None = None
    event: bytes | None = None
    until: threading.Event | None = None
    pieces: Sequence[bytes] = ()

    @classmethod
    def of(cls, tokens: int, **more: Any) -> Reply:
        return cls(chunks=["x "] * tokens, **more)


Script = Callable[[dict[str, Any], int], Reply]


@dataclass
class StandIn:
    """The server; `with StandIn(script) as server: server.url`.

    Args:
        script: gives the reply to (body, number of the request).
        models: entries of /v1/models. info: answer of /server_info, 404 when None.
        key: wanted in Authorization.

    Attributes (of what came in):
        bodies, headers: of every request for an answer, in order; names in small letters.
        most_under_way: at the same time.
    """

    script: Script = lambda body, index: Reply.of(body.get("max_tokens") or body.get("max_completion_tokens") or 4)
    models: Sequence[dict[str, Any]] = ({"id": "dummy:tiny", "object": "model"},)
    info: dict[str, Any] | None = None
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_under_way: int = 0
    extra_routes: Sequence[web.RouteDef] = ()
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        assert self._ready.wait(30), "the stand-in did not start"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stand-in did not stop"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/version", self._version),
                web.get("/server_info", self._info),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/embeddings", self._embeddings),
                *self.extra_routes,
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port, backlog=2048)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _json(self, value: Any, status: int = 200) -> web.Response:
        return web.json_response(value, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        if not self._may(request):
            return await self._refusal(401, "Invalid API key")
        return await self._json({"object": "list", "data": list(self.models)})

    async def _version(self, request: web.Request) -> web.Response:
        return await self._json({"version": "stand-in 1"})

    async def _info(self, request: web.Request) -> web.Response:
        return await self._json(self.info or {}, 404 if self.info is None else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(preemptions=len(self.bodies)))

    async def _refusal(self, status: int, message: str) -> web.Response:
        return await self._json({"error": {"message": message, "type": "refused", "code": status}}, status)

    def _may(self, request: web.Request) -> bool:
        return self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _reply(self, request: web.Request) -> tuple[dict[str, Any], Reply]:
        body = json.loads(await request.read())
        index = len(self.bodies)
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        reply = Reply(status=401) if not self._may(request) else self.script(body, index)
        if reply.until is not None:
            await asyncio.get_running_loop().run_in_executor(None, reply.until.wait, 60)
        return body, reply

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, lambda text: {"index": 0, "text": text, "finish_reason": None})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, lambda text: {"index": 0, "delta": {"content": text}, "finish_reason": None}, chat=True
        )

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        _, reply = await self._reply(request)
        if reply.status != 200:
            return await self._refusal(reply.status, "refused by the script")
        vector = {"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}
        return await self._json({"data": [vector], "usage": {"prompt_tokens": 3, "total_tokens": 3}})

    async def _answer(
        self, request: web.Request, choice: Callable[[str], dict[str, Any]], chat: bool = False
    ) -> web.StreamResponse:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            body, reply = await self._reply(request)
            if reply.status != 200:
                return await self._refusal(reply.status, "refused by the script")
            if body.get("stream"):
                return await self._stream(request, body, reply, choice, chat)
            text = "".join(reply.chunks)
            whole = {"index": 0, "finish_reason": reply.finish_reason}
            whole |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return await self._json({"choices": [whole], "usage": self._usage(reply)})
        finally:
            self._under_way -= 1

    def _usage(self, reply: Reply) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": len(reply.chunks) if reply.tokens is None else reply.tokens}

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        reply: Reply,
        choice: Callable[[str], dict[str, Any]],
        chat: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if reply.pieces:
            for piece in reply.pieces:
                await response.write(piece)
                await asyncio.sleep(0)
            return response

        async def send(value: Any) -> None:
            await response.write(f"data: {json.dumps(value)}\n\n".encode())

        if chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index, text in enumerate(reply.chunks):
            if index < len(reply.gaps) and reply.gaps[index]:
                await asyncio.sleep(reply.gaps[index])
            if reply.cut_after == index:
                assert request.transport is not None
                request.transport.abort()
                return response
            if index == 1 and reply.event is not None:
                await response.write(reply.event)
                continue
            await send({"choices": [choice(text)], "usage": None})
        if reply.finish:
            await send({"choices": [choice("") | {"finish_reason": reply.finish_reason}]})
        if reply.usage and (body.get("stream_options") or {}).get("include_usage"):
            await send({"choices": [], "usage": self._usage(reply)})
        if reply.finish:
            await response.write(b"data: [DONE]\n\n")
        return response
