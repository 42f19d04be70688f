"""Request bodies: OpenAI's fields and the ones that vLLM's users send beside them.

Every optional field takes an explicit null, and unknown fields are passed over, as clients of many versions send both.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams
from research_engine.server.errors import ApiError, invalid

MAX_STOPS = 4


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`, as vLLM names it."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: of a text, or of a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """The engine's parameters of a request.

    Raises:
        ApiError: 400, naming the field.
    """
    stop = request.stop
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise invalid(f"stop = {stop!r}: at most {MAX_STOPS} strings", "stop")
    if request.use_beam_search:
        raise invalid("use_beam_search = true: beam search is not supported", "use_beam_search")
    given: dict[str, Any] = {}
    for name in _SAME_NAME:
        if (value := getattr(request, name)) is not None:
            given[name] = value
    if request.seed is not None:
        given["seed"] = request.seed % 2**64  # equal seeds modulo 2**64 draw alike
    if request.logit_bias:
        given["logit_bias"] = _token_keys(request.logit_bias)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=form,
            **given,
        )
    except ValueError as error:
        raise invalid(str(error)) from None


_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        made = {int(token_id): value for token_id, value in bias.items()}
        if any(not -(2**31) <= token_id < 2**31 for token_id in made):
            raise ValueError("one is out of range")
        return made
    except ValueError as error:
        raise invalid(f"logit_bias: keys are token ids ({error})", "logit_bias") from None


def structured_form(request: SamplingFields) -> StructuredOutputsParams | None:
    """The form that the output must have, by whichever field it was asked for.

    Raises:
        ApiError: 400, two of them are given, or one is not whole.
    """
    forms: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        forms["response_format"] = _response_format(request.response_format)
    if request.structured_outputs is not None:
        forms["structured_outputs"] = msgspec.structs.asdict(request.structured_outputs)
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            forms[f"guided_{name}"] = {name: value}
    if not forms:
        return None
    if len(forms) > 1:
        raise invalid(f"{' and '.join(forms)} are given; a request takes one of them", next(iter(forms)))
    ((name, values),) = forms.items()
    try:
        return StructuredOutputsParams(**{key: value for key, value in values.items() if value is not None})
    except ValueError as error:
        raise ApiError(400, str(error), param=name) from None


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": wanted.json_schema.schema}
