"""The endpoints that only read: models, health, version, metrics, the timeline, the tokenizer and the configuration."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from research_engine import __version__
from research_engine.server.context import ServerContext
from research_engine.server.metrics import prometheus_text
from research_engine.server.wire import StepSummary


def status_router(context: ServerContext, resolved: dict[str, Any]) -> APIRouter:
    """Routes on one context; `resolved` is what the server was started with."""
    router = APIRouter()

    @router.get("/health", summary="200 while requests are served, 503 otherwise")
    async def health() -> Response:
        served = context.client.is_alive and not context.draining
        return Response(status_code=200 if served else 503, headers=None if served else {"retry-after": "1"})

    @router.get("/version", summary="The version of the server")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @router.get("/server_info", summary="Options, versions and sizes that the server was started with")
    async def server_info() -> JSONResponse:
        return JSONResponse(resolved)

    @router.get("/tokenizer_info", summary="Special tokens and chat template, by their names in tokenizer_config.json")
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse({"tokenizer_class": "PreTrainedTokenizerFast", **context.require_tokenizer().config()})

    @router.get("/v1/models", summary="The names that requests may use")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(context, name) for name in context.model_names]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> JSONResponse:
        context.check_model(name)
        return JSONResponse(_model(context, name))

    @router.get("/metrics", summary="Counts for Prometheus")
    async def metrics() -> Response:
        text = prometheus_text(context.client, context.model)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/stats", summary="The present state, and the steps after `since` of the latest 512")
    async def stats(since: int = -1) -> JSONResponse:
        return JSONResponse(_stats(context, since))

    return router


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    ready = context.client.ready
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "research_engine",
        "root": context.model,
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
    }


def _stats(context: ServerContext, since: int) -> dict[str, Any]:
    client = context.client
    snapshot, ready = client.snapshot, client.ready
    return {
        "now": 0.0 if ready is None else time.perf_counter() - ready.clock_zero,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "unanswered": client.num_unanswered,
        "kv_utilization": snapshot.kv_utilization,
        "prompt_tokens_total": snapshot.counters.get("prompt_tokens", 0),
        "generation_tokens_total": snapshot.counters.get("generation_tokens", 0),
        "model": context.model,
        "scheduler": client.source.options.scheduler,
        "steps": [_step(step) for step in client.steps if step.step > since],
    }


def _step(step: StepSummary) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}
