"""From one prompt and its n to the requests that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .config import EngineConfig
from .errors import RequestError
from .request import Request
from .sampling_params import SamplingParams
from .structured import TokenConstraint
from .text import DecodeStream, TextAssembler


def continuation_ids(request_id: str, n: int) -> list[str]:
    """`id` alone, or `id/0`, `id/1` ... for n > 1."""
    return [request_id] if n == 1 else [f"{request_id}/{index}" for index in range(n)]


def make_group(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    config: EngineConfig,
    *,
    first_index: int,
    arrival_time: float,
    max_tokens: int,
    priority: int,
    client: str,
    deadline: float | None,
    predicted_tokens: int | None,
    arriving: int,
    decode_stream: Callable[[SamplingParams], DecodeStream] | None,
    constrain: Callable[[SamplingParams], TokenConstraint | None] | None,
) -> list[Request]:
    """The n continuations of a prompt; all but the first may share the first one's blocks.

    Args:
        first_index: of the first one in the order of all requests ever added; continuation i has first_index + i and,
            unless the sampling brings a seed, one made of the engine's seed and first_index.
        arriving: leading tokens whose KV comes with the request.
        others: as `Engine.add_request` takes them.
    """
    seed = sampling.seed if sampling.seed is not None else (config.seed << 32) + first_index
    eos = frozenset() if sampling.ignore_eos else frozenset(config.eos_token_ids)
    stop_ids = frozenset(sampling.stop_token_ids) | eos
    group: list[Request] = []
    for index, name in enumerate(continuation_ids(request_id, sampling.n)):
        own = sampling if sampling.n == 1 else sampling.for_continuation(index, seed)
        group.append(
            Request(
                name,
                prompt_token_ids,
                own,
                arrival_time=arrival_time,
                max_tokens=max_tokens,
                seed=seed + index,
                stop_token_ids=stop_ids,
                priority=priority,
                client=client,
                deadline=deadline,
                predicted_tokens=predicted_tokens,
                group_id=request_id,
                sibling=group[0] if group else None,
                text=_text_of(own, decode_stream),
                constraint=_constraint_of(own, constrain),
                index=first_index + index,
                arriving=arriving,
            )
        )
    return group


def _text_of(
    sampling: SamplingParams, decode_stream: Callable[[SamplingParams], DecodeStream] | None
) -> TextAssembler | None:
    if decode_stream is None or not sampling.detokenize:
        if sampling.stop:
            raise RequestError(f"stop = {sampling.stop!r} needs a tokenizer, and this engine has none")
        return None
    return TextAssembler(
        decode_stream(sampling),
        sampling.stop,
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )


def _constraint_of(
    sampling: SamplingParams, constrain: Callable[[SamplingParams], TokenConstraint | None] | None
) -> TokenConstraint | None:
    if sampling.structured_outputs is None:
        return None
    if constrain is None:
        raise RequestError("structured_outputs needs a tokenizer, and this engine has none")
    try:
        return constrain(sampling)
    except ValueError as error:
        raise RequestError(str(error)) from error
