"""What becomes of a drawn token: its text, and whether it ends its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .contract import Request, TokenLogprobs


class TokenOutput(NamedTuple):
    """One token that came out of a step.

    `text` is what may be shown now; a token that a stop string took back, or an end token, brings none.
    """

    request: Request
    token_id: int
    text: str
    finish_reason: str | None
    logprobs: TokenLogprobs | None


def take_token(request: Request, token_id: int, now: float) -> tuple[str, str | None]:
    """Put a drawn token in the place kept for it.

    Mutates the request's tokens, text and times.

    Returns:
        The text that may be shown now, and why the request ends with this token, or None.
    """
    tokens, text, reason, delta = request._tokens, request._text, None, ""
    tokens[-1] = token_id
    if request._first_token_time is None:
        request._first_token_time = now
    request._last_token_time = now
    if token_id in request._stop_ids and len(tokens) - request._num_prompt >= request.sampling.min_tokens:
        reason = "stop"
    if text is not None:
        if reason is None or request.sampling.include_stop_str_in_output:
            delta = text.push(token_id)
        if text.stopped_by is not None:
            reason = "stop"
    if reason is None and request.constraint is not None:
        request.constraint.advance(token_id)
        reason = request.constraint.ended
    if reason is None and len(tokens) >= request._length_limit:
        reason = "length"
    if reason is not None and text is not None:
        delta += text.finish()
        if text.stopped_by is not None:  # the tail completed a stop string
            reason = "stop"
    return delta, reason


def take_prompt_logprobs(request: Request, start: int, entries: Sequence[TokenLogprobs]) -> None:
    """Mutates the request: entries of prompt tokens from start + 1 on, less those known from before a preemption."""
    known = max(0, len(request._prompt_logprobs) - start)
    request._prompt_logprobs.extend(entries[known:])
