"""The OpenAPI description of the POST endpoints, from the structs that decode their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from research_engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_STATUSES = {
    "400": "A field is wrong, or the request can never be served",
    "401": "A key is needed",
    "404": "There is no such model",
    "413": "The body is too large",
    "415": "The body is no JSON",
    "431": "The headers are too large",
    "500": "The engine failed at this request",
    "503": "Try again: the queue is full, or the server starts or stops",
}


def describe_posts(document: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Add the endpoints to FastAPI's document; mutates and returns it."""
    bodies = [_BODIES[path] for path in paths]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    kept = document.setdefault("components", {}).setdefault("schemas", {})
    kept.update(components)
    kept["Error"] = _ERROR
    refused = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in _STATUSES.items()
    }
    for path, body, schema in zip(paths, bodies, schemas, strict=True):
        answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "stream" in body.__struct_fields__:
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        document["paths"][path] = {
            "post": {
                "summary": (body.__doc__ or "").partition("`: ")[2] or f"As OpenAI's {path}",
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "The answer", "content": answers}, **refused},
            }
        }
    return document
