"""The usual way to serve an engine, to measure against: FastAPI with the engine in its event loop, one process.

Pydantic models in and out, one queue a request, one event a token; nothing is left out that the measured requests use
but keys, limits and aborts, which would cost it more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.token_output import TokenOutput
from research_engine.loading.tokenizer import byte_tokenizer


class Request(BaseModel):
    """The fields that the benchmark sends, and a few of the rest."""

    prompt: str
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: list[str] | None = None
    stream: bool = False
    ignore_eos: bool = False


class Choice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


def baseline_app(engine: Engine) -> FastAPI:
    """The application around an engine."""
    queues: dict[str, asyncio.Queue[TokenOutput]] = {}
    work = asyncio.Event()
    tokenizer = byte_tokenizer()

    async def steps() -> None:
        while True:
            if not engine.has_unfinished:
                work.clear()
                await work.wait()
            for output in engine.step():
                queues[output.request.id].put_nowait(output)
            await asyncio.sleep(0)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(steps())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    async def outputs(request: Request, name: str, prompt: list[int]) -> AsyncIterator[TokenOutput]:
        queue = queues[name] = asyncio.Queue()
        sampling = SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, top_p=request.top_p,
            stop=request.stop or (), ignore_eos=request.ignore_eos,
        )  # fmt: skip
        engine.add_request(name, prompt, sampling)
        work.set()
        while True:
            output = await queue.get()
            yield output
            if output.finish_reason is not None:
                del queues[name]
                return

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Answer | StreamingResponse:
        name, created, model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), request.model or "stub"
        prompt = tokenizer.encode(request.prompt)

        def answer(text: str, reason: str | None) -> Answer:
            return Answer(id=name, created=created, model=model, choices=[Choice(text=text, finish_reason=reason)])

        async def events() -> AsyncIterator[str]:
            async for output in outputs(request, name, prompt):
                yield f"data: {answer(output.text, output.finish_reason).model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        if request.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        texts, reason, count = [], None, 0
        async for output in outputs(request, name, prompt):
            texts.append(output.text)
            reason, count = output.finish_reason, count + 1
        whole = answer("".join(texts), reason)
        whole.usage = Usage(prompt_tokens=len(prompt), completion_tokens=count, total_tokens=len(prompt) + count)
        return whole

    return app
