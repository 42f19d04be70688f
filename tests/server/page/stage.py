"""A server that shows the page and plays what a test has written: models, engine state, answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from research_engine.server.page import page_router


class Stage:
    """`with Stage() as stage: stage.url`.

    Attributes that a test sets:
        answer: pieces of the next answers. hold: wait before the last piece until it is set, or the client is gone.
        key: wanted in Authorization. refusal: message of an error in place of an answer.
        steps, running, waiting, kv, tokens, now: what /stats says.

    Attributes that it reads:
        asked: bodies of the chat requests. gone: set when a client hung up in the middle of an answer.
    """

    def __init__(self) -> None:
        self.answer: list[str] = ["Hello", " there"]
        self.hold: threading.Event | None = None
        self.key: str | None = None
        self.refusal: str | None = None
        self.steps: list[dict[str, Any]] = []
        self.running, self.waiting, self.kv = 3, 2, 0.25
        self.tokens, self.now = (0, 0), 0.0
        self.asked: list[dict[str, Any]] = []
        self.gone = threading.Event()
        config = uvicorn.Config(self._app(), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Stage:
        self._thread.start()
        for _ in range(6000):
            if self._server.started:
                break
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page_router())

        @app.get("/v1/models")
        async def models(request: Request) -> JSONResponse:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "Invalid API key.")
            return JSONResponse({"data": [{"id": "small"}, {"id": "large"}]})

        @app.get("/stats")
        async def stats(since: int = -1) -> JSONResponse:
            return JSONResponse({
                "now": self.now, "running": self.running, "waiting": self.waiting, "kv_utilization": self.kv,
                "prompt_tokens_total": self.tokens[0], "generation_tokens_total": self.tokens[1],
                "model": "small", "scheduler": "fcfs", "steps": [step for step in self.steps if step["step"] > since],
            })  # fmt: skip

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.asked.append(await request.json())
            if self.refusal is not None:
                return _error(400, self.refusal)
            return StreamingResponse(self._stream(), media_type="text/event-stream")

        return app

    async def _stream(self) -> AsyncIterator[str]:
        def event(value: Any) -> str:
            return f"data: {json.dumps(value)}\n\n"

        def delta(finish: str | None = None, **content: str) -> str:
            return event({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})

        try:
            yield delta(role="assistant", content="")
            for index, piece in enumerate(self.answer):
                while self.hold is not None and index == len(self.answer) - 1 and not self.hold.is_set():
                    await asyncio.sleep(0.01)
                yield delta(content=piece)
            yield delta("stop")
            yield event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 42}})
            yield "data: [DONE]\n\n"
        except BaseException:
            self.gone.set()
            raise


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def busy_steps(seconds: float = 10.0) -> list[dict[str, Any]]:
    """Steps as continuous batching makes them: decode of a growing batch, and a prefill now and then."""
    steps, now, number = [], 0.0, 0
    while now < seconds:
        decode = 8 + number % 40
        prefill = 180 if number % 23 == 7 else 64 if number % 11 == 3 else 0
        took = 0.02 + 0.0004 * prefill
        steps.append({"step": number, "started": now, "finished": now + took, "num_tokens": decode + prefill,
                      "num_prefill_tokens": prefill, "num_decode_tokens": decode,
                      "num_requests": decode + (prefill > 0)})  # fmt: skip
        now += took + 0.002 + (0.8 if number % 97 == 96 else 0.0)
        number += 1
    return steps
