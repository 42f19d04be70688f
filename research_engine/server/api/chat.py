"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from research_engine.engine.structured import StructuredOutputsParams
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
from research_engine.server.api.conversation import check_tools, template_messages
from research_engine.server.api.token_texts import TokenTexts
from research_engine.server.api.tool_calls import ToolCall, ToolCallStream, parse
from research_engine.server.context import ServerContext, off_the_loop
from research_engine.server.engine_client import Generation
from research_engine.server.errors import decoded, invalid
from research_engine.server.http import Call
from research_engine.server.protocol import ChatRequest, sampling_params, structured_form
from research_engine.server.wire import Delta, Finish

_decoder = msgspec.json.Decoder(ChatRequest)
_BEGIN = b'"delta":{"role":"assistant","content":""}'
_GOES_ON = b',"logprobs":null,"finish_reason":null}]}\n\n'


async def chat_completions(context: ServerContext, call: Call) -> None:
    """Answer a conversation.

    Raises:
        ApiError: refused, or not served.
    """
    request = decoded(_decoder, call.body)
    context.ignored.look(ChatRequest, call.body)
    context.check_model(request.model)
    context.check_generates()
    check_stream_options(request)
    logprobs = _logprobs(request, context.max_logprobs)
    names, form = _tools_and_form(request)
    variables = request.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt", "self"):
        if name in variables:
            raise invalid(f"chat_template_kwargs holds {name!r}: a template gets its own", "chat_template_kwargs")
    prompt = await chat_prompt(
        context,
        request.messages,
        size=len(call.body),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=request.tools if names else None,
        variables=variables,
    )
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    sampling = sampling_params(request, max_tokens=limit, logprobs=logprobs, form=form)
    await check_form(context, form, request)
    answer_id = new_id("chatcmpl")
    streamed = bool(request.stream)
    with start(context, call, answer_id, [prompt], sampling, request, stream=streamed) as generation:
        answer = _Answer(context, request, answer_id, generation, len(prompt), names)
        if streamed:
            await stream(call, generation, "messages", answer.events, answer.last_event)
        else:
            deltas = await whole(call, generation, "messages")
            await call.reply(answer.body(deltas))


async def chat_prompt(
    context: ServerContext,
    messages: list[dict[str, Any]],
    *,
    size: int,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        size: bytes of the request.

    Raises:
        ApiError: 400, the messages are wrong, or the template refuses them.
    """
    known = dict(variables or {})
    if tools:
        known["tools"] = tools
    made, tokenizer = template_messages(messages), context.require_tokenizer()

    def encode() -> list[int]:
        return tokenizer.apply_chat_template(made, add_generation_prompt, **known)

    try:
        return await off_the_loop(size, encode)
    except (ValueError, TypeError) as error:
        raise invalid(str(error), "messages") from None


def _logprobs(request: ChatRequest, most: int) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs is only for logprobs = true", "top_logprobs")
    top = request.top_logprobs or 0
    if not 0 <= top <= most:
        raise invalid(f"top_logprobs = {top}: must be from 0 to {most}", "top_logprobs")
    return top if request.logprobs else None


def _tools_and_form(request: ChatRequest) -> tuple[frozenset[str], StructuredOutputsParams | None]:
    """Functions whose calls are read out of the text, and the form that the text must have.

    `auto` leaves it to the model, `none` hides the tools; `required` and a named function force a call by its schema.
    """
    form, tools, choice = structured_form(request), request.tools or [], request.tool_choice
    check_tools(tools)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice is None or choice in ("auto", "none"):
        return frozenset(() if choice == "none" else functions), form
    if choice == "required":
        wanted = list(functions)
    elif isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        wanted = [str(choice["function"].get("name"))]
    else:
        raise invalid(f"tool_choice = {choice!r}: must be none, auto, required or a function", "tool_choice")
    unknown = [name for name in wanted if name not in functions]
    if unknown or not wanted:
        has = ", ".join(functions) or "none"
        raise invalid(f"tool_choice asks for {', '.join(unknown) or 'a call'}; tools has {has}", "tool_choice")
    if form is not None:
        raise invalid("tool_choice forces a call and response_format another form; give one of them", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": functions[name].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in wanted
    ]
    return frozenset(wanted), StructuredOutputsParams(json=calls[0] if len(calls) == 1 else {"anyOf": calls})


class _Answer:
    """Makes the body, or the events, of one answer."""

    def __init__(
        self,
        context: ServerContext,
        request: ChatRequest,
        answer_id: str,
        generation: Generation,
        prompt_tokens: int,
        names: frozenset[str],
    ) -> None:
        self._context = context
        self._request = request
        self._generation = generation
        self._names = names
        self._tokens = TokenTexts(context.tokenizer)
        self._id, self._created = answer_id, int(time.time())
        self._usage = Usage(prompt_tokens)
        self._opening = to_json(self._head("chat.completion.chunk"))[:-1] + b',"choices":[{"index":'
        self._begun: set[int] = set()
        self._tool_streams: dict[int, ToolCallStream] = {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._context.model}

    def body(self, deltas: list[Delta]) -> bytes:
        choices = []
        for delta in deltas:
            self._usage.add(delta)
            text, calls = parse(delta.text, self._names) if self._names else (delta.text, [])
            message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
            if calls:
                message["tool_calls"] = [call.told() for call in calls]
            finish = delta.finish
            assert finish is not None
            choices.append({
                "index": self._generation.choice(delta),
                "message": message,
                "logprobs": None if delta.logprobs is None else self._tokens.chat(delta.logprobs),
                "finish_reason": _reason(finish, calls),
                "stop_reason": finish.stop_reason,
            })  # fmt: skip
        usage = self._usage.told(self._context)
        return to_json({**self._head("chat.completion"), "choices": choices, "usage": usage})

    def events(self, deltas: list[Delta]) -> bytes:
        parts = []
        for delta in deltas:
            self._usage.add(delta)
            choice = self._generation.choice(delta)
            if choice not in self._begun:
                self._begun.add(choice)
                parts.append(b"data: %b%d,%b%b" % (self._opening, choice, _BEGIN, _GOES_ON))
            if delta.finish is None and delta.logprobs is None and not self._names:
                if delta.text:
                    text = to_json(delta.text)
                    parts.append(b'data: %b%d,"delta":{"content":%b}%b' % (self._opening, choice, text, _GOES_ON))
                continue
            content, calls = self._split(choice, delta)
            made: dict[str, Any] = {"delta": {"content": content} if content else {}}
            if calls:
                made["delta"]["tool_calls"] = [call.told(index) for index, call in enumerate(calls)]
            made["logprobs"] = None if delta.logprobs is None else self._tokens.chat(delta.logprobs)
            made["finish_reason"] = None if delta.finish is None else _reason(delta.finish, calls)
            if delta.finish is not None:
                made["stop_reason"] = delta.finish.stop_reason
            elif not content and not delta.logprobs:
                continue
            parts.append(b"data: %b%d,%b]}\n\n" % (self._opening, choice, to_json(made)[1:]))
        return b"".join(parts)

    def _split(self, choice: int, delta: Delta) -> tuple[str, list[ToolCall]]:
        """What may be shown of a delta, and at the end the calls."""
        if not self._names:
            return delta.text, []
        split = self._tool_streams.setdefault(choice, ToolCallStream(self._names))
        content, calls = split.push(delta.text), list[ToolCall]()
        if delta.finish is not None:
            rest, calls = split.finish()
            content += rest
        return content, calls

    def last_event(self) -> bytes:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return b""
        told = {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.told(self._context)}
        return b"data: " + to_json(told) + b"\n\n"


def _reason(finish: Finish, calls: list[ToolCall]) -> str:
    return "tool_calls" if calls and finish.reason == "stop" else finish.reason
