"""The rules of a request: what could never be served is refused when it is added, with the numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from numbers import Integral, Real

from .config import EngineConfig
from .errors import PromptTooLongError, RequestError
from .sampling_params import SamplingParams


def check_facts(
    request_id: str,
    arrival_time: float | None,
    priority: int,
    client: str,
    deadline: float | None,
    predicted_tokens: int | None,
) -> None:
    """Check what policies go by, so that a wrong one is not taken for a fault of theirs.

    Raises:
        RequestError: naming the value and the rule.
    """
    rule = None
    if arrival_time is not None and not (isinstance(arrival_time, Real) and math.isfinite(arrival_time)):
        rule = f"arrival_time is {arrival_time!r}; it must be a finite number of clock seconds, or None"
    elif not isinstance(priority, Integral):
        rule = f"priority is {priority!r}; it must be an integer"
    elif not isinstance(client, str):
        rule = f"client is {client!r}; it must be a text"
    elif deadline is not None and not (isinstance(deadline, Real) and not math.isnan(deadline)):
        rule = f"deadline is {deadline!r}; it must be a number of clock seconds, or None"
    elif predicted_tokens is not None and not (isinstance(predicted_tokens, Integral) and predicted_tokens >= 0):
        rule = f"predicted_tokens is {predicted_tokens!r}; it must be an integer >= 0, or None"
    if rule is not None:
        raise RequestError(f"request {request_id!r}: {rule}")


def check_request(
    request_id: str, prompt: Sequence[int], sampling: SamplingParams, config: EngineConfig, computed_tokens: int = 0
) -> int:
    """Check a request against the engine's limits.

    Args:
        computed_tokens: leading tokens of the prompt whose KV comes with it.

    Returns:
        How many output tokens it may have: max_tokens, cut to what the model's length leaves.

    Raises:
        RequestError: naming the value and the limit.
    """

    def refused(rule: str) -> RequestError:
        return RequestError(f"request {request_id!r}: {rule}")

    if not isinstance(sampling, SamplingParams):
        raise refused(f"sampling is {sampling!r}; it must be a SamplingParams")
    if not isinstance(request_id, str):
        raise refused("its id must be a string")
    try:
        array("q", prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(f"the prompt must be a sequence of 64-bit integers, token ids ({error})") from error
    if len(prompt) == 0:
        raise refused("the prompt is empty; it needs at least one token")
    if not isinstance(computed_tokens, Integral) or not 0 <= computed_tokens < len(prompt):
        rule = "must be an integer >= 0 and leave at least one of them to compute, for its logits"
        raise refused(f"computed_tokens = {computed_tokens} of {len(prompt)} prompt tokens; it {rule}")
    if computed_tokens and (sampling.n > 1 or sampling.prompt_logprobs is not None):
        raise refused(f"computed_tokens = {computed_tokens}: with n > 1 or prompt_logprobs the prompt is computed here")
    limit = config.max_model_len
    if len(prompt) >= limit:
        rule = f"with max_model_len = {limit} at most {limit - 1} leave room for an output"
        raise PromptTooLongError(f"request {request_id!r}: the prompt has {len(prompt)} tokens; {rule}")
    named = [("prompt", prompt), ("stop_token_ids", sampling.stop_token_ids), ("logit_bias", list(sampling.logit_bias))]
    for name, ids in named:
        low, high = (min(ids), max(ids)) if len(ids) else (0, 0)
        if low < 0 or (config.vocab_size and high >= config.vocab_size):
            bad = low if low < 0 else high
            size = config.vocab_size
            top = f"{size - 1} (vocabulary of {size})" if size else "the vocabulary's size"
            raise refused(f"{name} holds token id {bad}; ids go from 0 to {top}")
    if sampling.min_tokens and config.vocab_size:  # one whose logits are all masked would take its whole batch down
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else config.eos_token_ids)}
        if len(stops) >= config.vocab_size:
            raise refused(f"min_tokens = {sampling.min_tokens} leaves nothing to draw: every token is a stop token")
    room = limit - len(prompt)
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    slots = len(prompt) + max_tokens - 1  # the last token is never computed
    if slots > config.num_slots:
        raise refused(
            f"{len(prompt)} prompt tokens and max_tokens = {max_tokens} need {slots} KV slots; the cache has "
            f"{config.num_slots} ({config.num_blocks} blocks of {config.block_size}): shorten it or enlarge the cache"
        )
    return max_tokens
