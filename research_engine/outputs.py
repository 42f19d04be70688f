"""What `LLM.generate` and `LLM.embed` return, named as vLLM's users know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from research_engine.engine.records import RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from research_engine.executors.embedding import Vectors


class Logprob(NamedTuple):
    """Log-probability of a token, its rank (1 = most probable), and its text (None without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: which of the n.
        text: without stop string or end token, unless include_stop_str_in_output; empty when no text is made.
        token_ids: all that were drawn, a final stop token included.
        cumulative_logprob: sum over the tokens, when log-probabilities were asked for.
        logprobs: per token, token id -> Logprob of the drawn token and of the most probable ones.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it; None for an end token or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        prompt: its text; None when token ids were given.
        prompt_logprobs: per prompt token, as `CompletionOutput.logprobs`; None for the first. None when not asked for.
        outputs: n continuations by index.
        metrics: times on the engine's clock and token counts; over all continuations when n > 1 (earliest first token,
            latest last token and end, output tokens, recomputed tokens and preemptions summed).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestRecord


@dataclass(frozen=True)
class EmbeddingOutput:
    """What a text became.

    Attributes:
        vector: float32 [H].
        lexical_weights: token id -> its largest weight, where it is positive; special tokens left out. None unless
            asked for.
        token_vectors: float32 [T - 1, M], for every token but the first, each of length 1. None unless asked for.
    """

    vector: NDArray[np.float32]
    lexical_weights: dict[int, float] | None = None
    token_vectors: NDArray[np.float32] | None = None

    @property
    def embedding(self) -> list[float]:
        """`vector` as a list."""
        numbers: list[float] = self.vector.tolist()
        return numbers


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One text and its embedding. `prompt` is the text; None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


_SPECIAL_TOKENS = frozenset(range(4))  # <s>, <pad>, </s> and <unk> of XLM-RoBERTa


def embedding_output(token_ids: Sequence[int], made: Vectors) -> EmbeddingOutput:
    """From what the executor made of a text's tokens, as BGE-M3 defines it (Chen et al., 2402.03216)."""
    weights: dict[int, float] | None = None
    if made.lexical is not None:
        weights = {}
        for token_id, weight in zip(token_ids, made.lexical.tolist(), strict=True):
            if weight > weights.get(token_id, 0.0) and token_id not in _SPECIAL_TOKENS:
                weights[token_id] = weight
    return EmbeddingOutput(made.dense, weights, None if made.multi is None else made.multi[1:])


def merged_record(records: Sequence[RequestRecord]) -> RequestRecord:
    """One record for all continuations of a prompt."""

    def known(name: str) -> list[float]:
        return [value for record in records if (value := getattr(record, name)) is not None]

    return replace(
        records[0],
        first_scheduled_time=min(known("first_scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        finish_time=max(known("finish_time"), default=None),
        output_tokens=sum(record.output_tokens for record in records),
        recomputed_tokens=sum(record.recomputed_tokens for record in records),
        preemptions=sum(record.preemptions for record in records),
    )
