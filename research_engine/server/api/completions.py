"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from research_engine.engine.contract import TokenLogprobs
from research_engine.server.api.answers import (
    Usage,
    check_form,
    check_stream_options,
    new_id,
    start,
    stream,
    to_json,
    whole,
)
from research_engine.server.api.token_texts import LEAST, TokenTexts
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import Generation
from research_engine.server.errors import decoded, invalid
from research_engine.server.http import Call
from research_engine.server.protocol import CompletionRequest, sampling_params, structured_form
from research_engine.server.wire import Delta

_decoder = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048
MAX_CONTINUATIONS = 8192  # of all prompts of a request


async def completions(context: ServerContext, call: Call) -> None:
    """Continue prompts.

    Raises:
        ApiError: refused, or not served.
    """
    request = decoded(_decoder, call.body)
    context.ignored.look(CompletionRequest, call.body)
    context.check_model(request.model)
    context.check_generates()
    check_stream_options(request)
    _check(request, context.max_logprobs)
    texts, prompts = await _prompts(context, request)
    nothing = request.max_tokens == 0  # scored alone: a token is drawn all the same, and not shown
    form = structured_form(request)
    sampling = sampling_params(
        request,
        max_tokens=1 if nothing else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        form=form,
    )
    if len(prompts) * sampling.n > MAX_CONTINUATIONS:
        most = MAX_CONTINUATIONS // len(prompts)
        raise invalid(f"n = {sampling.n}: with {len(prompts)} prompts it can be at most {most}", "n")
    await check_form(context, form, request)
    answer_id = new_id("cmpl")
    streamed = bool(request.stream)
    with start(context, call, answer_id, prompts, sampling, request, stream=streamed) as generation:
        answer = _Answer(context, request, answer_id, generation, prompts, texts, nothing)
        if streamed:
            await stream(call, generation, "prompt", answer.events, answer.last_event)
        else:
            deltas = await whole(call, generation, "prompt")
            await call.reply(answer.body(deltas))


def _check(request: CompletionRequest, max_logprobs: int) -> None:
    if request.suffix:
        raise invalid(f"suffix = {request.suffix!r}: filling in the middle is not supported", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid(f"best_of = {request.best_of}: must equal n, for all continuations are returned", "best_of")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(request, name)
        if value is not None and not 0 <= value <= max_logprobs:
            raise invalid(f"{name} = {value}: must be from 0 to {max_logprobs}", name)
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs are not streamed: set stream = false", "prompt_logprobs")
    if request.max_tokens is not None and request.max_tokens < (0 if request.echo else 1):
        raise invalid(f"max_tokens = {request.max_tokens}: must be >= 1, or 0 with echo = true", "max_tokens")


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    return request.logprobs if request.echo and request.logprobs is not None else request.prompt_logprobs


async def _prompts(context: ServerContext, request: CompletionRequest) -> tuple[list[str | None], list[list[int]]]:
    """Texts, where prompts were given as such, and token ids."""
    prompt = request.prompt
    if prompt is None:
        raise invalid(
            "prompt is missing: a text, a list of token ids, or a list of either; /v1/chat/completions takes messages",
            "prompt",
        )
    many: Sequence[Any]
    if isinstance(prompt, str) or (prompt and all(type(item) is int for item in prompt)):
        many = [prompt]
    else:
        many = prompt
    if not many or any(isinstance(item, int) for item in many):
        raise invalid("prompt must be a text, a list of token ids, or a list of either that is not empty", "prompt")
    if len(many) > MAX_PROMPTS:
        raise invalid(f"prompt holds {len(many)} prompts: at most {MAX_PROMPTS} in a request", "prompt")
    add_special = request.add_special_tokens is not False
    for item in many:
        if isinstance(item, list):
            context.check_token_ids(item, "prompt")
    texts = [item if isinstance(item, str) else None for item in many]
    encoded = iter(await context.encode([text for text in texts if text is not None], add_special))
    ids: list[Any] = [next(encoded) if isinstance(item, str) else item for item in many]
    return texts, ids


class _Answer:
    """Makes the body, or the events, of one answer."""

    def __init__(
        self,
        context: ServerContext,
        request: CompletionRequest,
        answer_id: str,
        generation: Generation,
        prompts: list[list[int]],
        texts: list[str | None],
        nothing: bool,
    ) -> None:
        self._context = context
        self._request = request
        self._generation = generation
        self._prompts, self._texts, self._nothing = prompts, texts, nothing
        self._n = request.n or 1
        self._tokens = TokenTexts(context.tokenizer)
        self._head = {
            "id": answer_id, "object": "text_completion", "created": int(time.time()), "model": context.model,
        }  # fmt: skip
        self._usage = Usage(sum(map(len, prompts)))
        self._offsets: dict[int, int] = {}  # choice -> characters of its text so far
        self._opening = to_json(self._head)[:-1] + b',"choices":[{"index":'
        self._echoed: set[int] = set()
        self._of_prompts: dict[int, list[TokenLogprobs]] = {}

    def body(self, deltas: list[Delta]) -> bytes:
        choices = []
        for delta in deltas:
            self._count(delta)
            choice = self._generation.choice(delta)
            text, logprobs = self._shown(choice, delta)
            finish = delta.finish
            assert finish is not None
            made: dict[str, Any] = {
                "index": choice, "text": text, "logprobs": logprobs,
                "finish_reason": "length" if self._nothing else finish.reason, "stop_reason": finish.stop_reason,
            }  # fmt: skip
            if self._request.prompt_logprobs is not None:
                made["prompt_logprobs"] = self._prompt_entries(delta)
            choices.append(made)
        return to_json({**self._head, "choices": choices, "usage": self._usage.told(self._context)})

    def events(self, deltas: list[Delta]) -> bytes:
        parts = []
        for delta in deltas:
            self._count(delta)
            choice = self._generation.choice(delta)
            finish = delta.finish
            plain = delta.logprobs is None and not self._request.echo
            if plain and finish is None:
                if delta.text:
                    parts.append(b'data: %b%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n'
                                 % (self._opening, choice, to_json(delta.text)))  # fmt: skip
                continue
            text, logprobs = self._shown(choice, delta)
            reason = None if finish is None else "length" if self._nothing else finish.reason
            made: dict[str, Any] = {"text": text, "logprobs": logprobs, "finish_reason": reason}
            if finish is not None:
                made["stop_reason"] = finish.stop_reason
            parts.append(b"data: %b%d,%b]}\n\n" % (self._opening, choice, to_json(made)[1:]))
        return b"".join(parts)

    def last_event(self) -> bytes:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return b""
        return b"data: " + to_json({**self._head, "choices": [], "usage": self._usage.told(self._context)}) + b"\n\n"

    def _count(self, delta: Delta) -> None:
        if self._nothing:
            delta.token_ids, delta.text, delta.logprobs = [], "", [] if delta.logprobs is not None else None
        self._usage.add(delta)

    def _shown(self, choice: int, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a delta, after those of the prompt if they are echoed."""
        text, ids = delta.text, delta.token_ids
        entries: list[Any] | None = delta.logprobs
        if self._request.echo and choice not in self._echoed:
            self._echoed.add(choice)
            prompt = self._prompts[choice // self._n]
            text = self._prompt_text(choice // self._n) + text
            ids = [*prompt, *ids]
            if self._request.logprobs is not None:
                entries = [None, *self._known_prompt_logprobs(delta, choice // self._n), *(entries or [])]
        logprobs = None
        if self._request.logprobs is not None:
            offset = self._offsets.get(choice, 0)
            logprobs = self._tokens.completion(entries or [], ids, offset)
            self._offsets[choice] = offset + sum(map(len, logprobs["tokens"]))
        return text, logprobs

    def _prompt_text(self, number: int) -> str:
        text = self._texts[number]
        if text is None and self._context.tokenizer is not None:
            text = self._context.tokenizer.decode(self._prompts[number], skip_special_tokens=False)
        return text or ""

    def _known_prompt_logprobs(self, delta: Delta, number: int) -> list[Any]:
        """Those of the prompt come with continuation 0, and serve its siblings."""
        if delta.prompt_logprobs is not None:
            self._of_prompts[number] = delta.prompt_logprobs
        return self._of_prompts[number]

    def _prompt_entries(self, delta: Delta) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per prompt token, id -> log-probability, rank and text."""
        entries: list[dict[str, Any] | None] = [None]
        for entry in delta.prompt_logprobs or []:
            ranked = {entry.token_id: (entry.logprob, entry.rank)}
            for rank, (token_id, logprob) in enumerate(entry.top, start=1):
                ranked.setdefault(token_id, (logprob, rank))
            named = {}
            for token_id, (logprob, rank) in ranked.items():
                text = self._tokens.text(token_id)
                named[str(token_id)] = {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}
            entries.append(named)
        return entries
