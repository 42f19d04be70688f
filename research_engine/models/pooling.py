"""How the hidden states of a text become its embedding: the rule, as data."""

from __future__ import annotations

from dataclasses import dataclass

POOLINGS = ("mean", "cls", "last")


@dataclass(frozen=True)
class Pooling:
    """One vector a text.

    Args:
        kind: "mean" of all tokens' hidden states, or that of the first ("cls") or the "last" token.
        normalize: whether vectors get the length 1.
        max_tokens: tokens of the longest text the embedder was made for; None for as many as the model has positions.
    """

    kind: str
    normalize: bool = True
    max_tokens: int | None = None
