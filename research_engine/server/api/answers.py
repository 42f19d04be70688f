"""Parts of answers that completions and chat share: ids, usage, and the loop that serves a generation."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import EngineDeadError, Generation, RefusedError
from research_engine.server.errors import ApiError, invalid, of_engine, unavailable
from research_engine.server.http import DONE, Call
from research_engine.server.protocol import SamplingFields
from research_engine.server.wire import Delta

to_json = msgspec.json.encode
HIDDEN_REASONS = ("abort", "error")  # a request that ends so gets an error, not an answer


def new_id(prefix: str) -> str:
    """The name of an answer, under which the engine knows its request, too."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def check_form(context: ServerContext, form: StructuredOutputsParams | None, request: SamplingFields) -> None:
    """Refuse a schema or grammar that does not compile before the engine sees it.

    Raises:
        ApiError: 400.
    """
    if form is None:
        return
    try:
        await asyncio.to_thread(context.grammars.check, form)
    except ValueError as error:
        named = (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        )
        raise invalid(str(error), next((name for name in named if getattr(request, name) is not None), None)) from None


def check_stream_options(request: SamplingFields) -> None:
    """Raises ApiError (400): stream_options without stream."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only for stream = true", "stream_options")


class Usage:
    """Tokens of one request: its prompts once, all its continuations."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.completion = 0
        self.cached: dict[int, int] = {}  # key of a prompt -> tokens found in the prefix cache

    def add(self, delta: Delta) -> None:
        self.completion += len(delta.token_ids)
        if delta.finish is not None and delta.index == 0:
            self.cached[delta.key] = delta.finish.cached_tokens

    def told(self, context: ServerContext) -> dict[str, Any]:
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if context.reports_cached_tokens:
            told["prompt_tokens_details"] = {"cached_tokens": sum(self.cached.values())}
        return told


def start(
    context: ServerContext,
    call: Call,
    answer_id: str,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    request: SamplingFields,
    *,
    stream: bool,
) -> Generation:
    """Hand prompts to the engine, for as long as the caller is within the generation's context.

    Raises:
        ApiError: 400, a number cannot be sent; 503, the server is shutting down or its engine is not running.
    """
    if context.draining:
        raise unavailable("the server is shutting down", "shutting_down")
    try:
        return context.client.generate(
            answer_id, prompts, sampling, stream=stream, arrived=call.arrived, priority=request.priority or 0,
            client=request.user or "",
        )  # fmt: skip
    except OverflowError:
        raise invalid("an integer is out of range: they have 64 bits") from None
    except EngineDeadError as error:
        raise of_engine(error) from None


async def whole(call: Call, generation: Generation, field: str) -> list[Delta]:
    """One delta a choice, in the order of choices, of a generation that is not streamed.

    Args:
        field: of the request that held the prompt, to be named where it is refused.

    Raises:
        ApiError: it was not served.
    """
    call.on_disconnect(generation.abort)
    deltas: list[Delta] = []
    try:
        while generation.keys:
            deltas += await generation.next()
    except (RefusedError, EngineDeadError) as error:
        raise of_engine(error, field) from None
    _check_served(deltas)
    return sorted(deltas, key=generation.choice)


async def stream(
    call: Call,
    generation: Generation,
    field: str,
    events: Callable[[list[Delta]], bytes],
    last: Callable[[], bytes],
) -> None:
    """Send a generation as it comes. Nothing is sent before its first tokens, so an error before them has its status.

    Args:
        field: of the request that held the prompt, to be named where it is refused.
        events: deltas as server-sent events; may be empty.
        last: events after all of them, before [DONE].

    Raises:
        ApiError: it was not served, and nothing has been sent.
    """
    call.on_disconnect(generation.abort)
    try:
        while True:
            deltas = await generation.next()
            _check_served(deltas)
            data = events(deltas)
            if not call.started:
                await call.begin_events()
            if generation.has_ended:
                break
            if data:
                await call.write(data)
    except (RefusedError, EngineDeadError, ApiError) as error:
        told = error if isinstance(error, ApiError) else of_engine(error, field)
        if not call.started:
            raise told from None
        generation.abort()
        await call.end_events(b"data: " + told.body() + b"\n\n" + DONE)
        return
    await call.end_events(data + last() + DONE)


def _check_served(deltas: list[Delta]) -> None:
    for delta in deltas:
        if delta.finish is not None and delta.finish.reason in HIDDEN_REASONS:
            if delta.finish.reason == "error":  # a form that is refused before the first token seldom gets here
                raise ApiError(
                    400, "the output could not be kept to its form: it is too complex", code="form_too_complex"
                )
            raise ApiError(500, "the request was not served: it was aborted", code="engine_error")
