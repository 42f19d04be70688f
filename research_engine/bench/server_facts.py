"""What a server says of itself: models, version, configuration, counters; kept in every result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from research_engine.bench.backends import error_message
from research_engine.bench.connection import ConnectionPool


class ServerError(ValueError):
    """The server does not answer, or refuses; names the address and says what it said."""


class NoModelList(ServerError):
    """There is a server, but it lists no models."""


async def model_of(pool: ConnectionPool, url: str) -> Mapping[str, Any]:
    """The first entry of /v1/models.

    Raises:
        ServerError: no server, or no key for it.
        NoModelList: no such page, or no model on it.
    """
    try:
        status, body = await pool.fetch("GET", "/v1/models")
    except OSError as error:
        raise ServerError(f"{url}: {error}; start a server, or give its --base-url") from None
    if status in (401, 403):
        raise ServerError(f"{url}/v1/models: HTTP {status}: {error_message(body)}; set OPENAI_API_KEY")
    if status != 200:
        kind = NoModelList if status == 404 else ServerError
        raise kind(f"{url}/v1/models: HTTP {status}: {error_message(body)}")
    try:
        models = json.loads(body)["data"]
        first: Mapping[str, Any] = models[0]
        str(first["id"])
    except (ValueError, LookupError, TypeError):
        raise NoModelList(f"{url}/v1/models: lists no model: {body[:200]!r}") from None
    return first


async def server_facts(pool: ConnectionPool) -> dict[str, Any]:
    """Answers of /version, /v1/models and /server_info, each only where the server has it."""
    facts: dict[str, Any] = {}
    for name, path in (("version", "/version"), ("models", "/v1/models"), ("server_info", "/server_info")):
        try:
            status, body = await pool.fetch("GET", path)
            if status == 200:
                facts[name] = json.loads(body)
        except (OSError, ValueError):
            continue
    return facts


async def counters(pool: ConnectionPool) -> dict[str, float]:
    """The engine's counters on /metrics (Prometheus text), summed over labels; empty without such a page."""
    try:
        status, body = await pool.fetch("GET", "/metrics")
    except OSError:
        return {}
    return parse_counters(body.decode(errors="replace")) if status == 200 else {}


def parse_counters(text: str) -> dict[str, float]:
    """`NAME_total` samples whose name begins with `vllm:` or `research_engine`, summed over labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if not name.endswith("_total") or not name.startswith(("vllm:", "research_engine")):
            continue
        words = line[len(name) :].rpartition("}")[2].split()  # value, and perhaps a time
        try:
            value = float(words[0])
        except (IndexError, ValueError):
            continue
        if math.isfinite(value):
            sums[name] = sums.get(name, 0.0) + value
    return sums


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the counters counted in between."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
