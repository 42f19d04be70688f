"""From requests to the arguments of `kernels.sample`, and from what it gives back to tokens and log-probabilities.

Parameters that stay the same while a request lives lie on the device by seat, so that a step of such requests sends
nothing. What changes from step to step is sent: logit biases together with the stop tokens that min_tokens still
forbids, the tokens that penalties look at, and the tokens that a constraint allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import torch

from research_engine import kernels
from research_engine.engine.contract import Request, ScheduledRequest, TokenLogprobs

_LARGEST = float(np.finfo(np.float32).max)
_STATUS = {-2: "hold NaN", -3: "hold inf"}


class _Traits(IntFlag):
    """What a request asks of the draw, so that a step of plain requests looks at none of them."""

    DRAWN = 1  # not greedy
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    LOGPROBS = 16
    BIASED = 32  # for some steps at least
    PENALISED = 64
    CONSTRAINED = 128

    @classmethod
    def of(cls, request: Request) -> _Traits:
        params, traits = request.sampling, cls(0)
        if not params.is_greedy:
            traits |= cls.DRAWN
            traits |= cls.TOP_K * (params.top_k > 0)
            traits |= cls.TOP_P * (params.top_p < 1.0)
            traits |= cls.MIN_P * (params.min_p > 0.0)
        traits |= cls.LOGPROBS * (params.logprobs is not None)
        traits |= cls.BIASED * (bool(params.logit_bias) or params.min_tokens > 0)
        traits |= cls.PENALISED * params.needs_penalties
        traits |= cls.CONSTRAINED * (request.constraint is not None)
        return traits


_LOOKED_AT = _Traits.LOGPROBS | _Traits.BIASED | _Traits.PENALISED | _Traits.CONSTRAINED  # request by request


class Draws(NamedTuple):
    """What the draw of S rows reads on the device; the outputs of a graph, padding rows included.

    Attributes:
        logits: [S, V].
        seats: int64 [S], where each row's request sits.
        num_tokens: int64 [S], how many tokens it has, which is the draw's position.
        temperature, seeds: float32 and int64 [S].
    """

    logits: torch.Tensor
    seats: torch.Tensor
    num_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor

    def first(self, count: int) -> Draws:
        """Without the padding behind the first `count` rows."""
        return self if len(self.seats) == count else Draws(*(tensor[:count] for tensor in self))


@dataclass(frozen=True)
class Draw:
    """What one step drew, S rows.

    Attributes:
        sampled: on the device; token_ids int64 [S].
        rows: of the batch, those that drew.
        wants_logprobs: whether any request asks for log-probabilities.
    """

    sampled: kernels.Sampled
    rows: Sequence[ScheduledRequest]
    wants_logprobs: bool

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises ValueError for a row that drew nothing: its logits are no numbers, or all -inf; names the request."""
        for row, token_id in zip(self.rows, token_ids, strict=True):
            at = row.start + row.num_tokens
            if token_id == -1:
                raise ValueError(f"request {row.request.id!r}: no token is left to draw at position {at}")
            if token_id < -1:
                raise ValueError(f"request {row.request.id!r}: the model's logits at position {at} {_STATUS[token_id]}")

    def logprobs(self, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Entries of the rows whose requests ask, by row; waits for the device if there are any."""
        sampled = self.sampled
        if not self.wants_logprobs or sampled.logprobs is None or sampled.ranks is None:
            return {}
        values, ranks = sampled.logprobs.double().tolist(), sampled.ranks.tolist()
        ids = sampled.top_ids.tolist() if sampled.top_ids is not None else None
        tops = sampled.top_logprobs.double().tolist() if sampled.top_logprobs is not None else None
        entries = {}
        for index, row in enumerate(self.rows):
            wanted = row.request.sampling.logprobs
            if wanted is None:
                continue
            top = tuple(zip(ids[index][:wanted], tops[index][:wanted], strict=True)) if ids and tops else ()
            top = tuple((token_id, value) for token_id, value in top if token_id >= 0)
            entries[index] = TokenLogprobs(token_ids[index], values[index], ranks[index], top)
        return entries


class Sampler:
    """Draws for requests that sit in seats.

    Args:
        num_seats: how many there are; one more, the last, is that of padding rows.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_seats + 1, dtype=dtype, device=device)

        self._temperature, self._top_p, self._min_p = (column(torch.float32) for _ in range(3))
        self._top_k, self._seeds = column(torch.int32), column(torch.int64)
        self._traits = np.zeros(num_seats, dtype=np.uint8)  # of who sits there

    def sit_down(self, newcomers: Sequence[tuple[int, Request]]) -> None:
        """Mutates: enters the parameters of requests that took a seat."""
        if not newcomers:
            return
        for seat, request in newcomers:
            self._traits[seat] = _Traits.of(request)
        params = [request.sampling for _, request in newcomers]
        seats = self._to_device(np.array([seat for seat, _ in newcomers], dtype=np.int64))
        seeds = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for _, request in newcomers], dtype=np.uint64)
        self._seeds[seats] = self._to_device(seeds.view(np.int64))
        self._top_k[seats] = self._to_device(np.array([p.top_k for p in params], dtype=np.int32))
        reals = np.array([(p.temperature, p.top_p, p.min_p) for p in params], dtype=np.float32)
        for column, values in zip((self._temperature, self._top_p, self._min_p), reals.T, strict=True):
            column[seats] = self._to_device(np.ascontiguousarray(values))

    def draws(self, logits: torch.Tensor, seats: torch.Tensor, num_tokens: torch.Tensor) -> Draws:
        """With what the device knows of those who sit there; device work alone, so that a graph can hold it."""
        return Draws(logits, seats, num_tokens, self._temperature[seats], self._seeds[seats])

    def draw(self, draws: Draws, rows: Sequence[ScheduledRequest], sitting: Sequence[int]) -> Draw:
        """Draw the next token of every request; the device is not waited for.

        Args:
            draws: S rows.
            rows: of the batch, those that draw, S of them; requests are not changed.
            sitting: S seats, as draws.seats, on the host.
        """
        traits = _Traits(int(np.bitwise_or.reduce(self._traits[list(sitting)])))
        options: dict[str, Any] = {}
        if traits & _LOOKED_AT:
            requests = [row.request for row in rows]
            asked = [r.sampling.logprobs for r in requests if r.sampling.logprobs is not None]
            options = {"num_logprobs": min(max(asked), self._vocab_size) if asked else None}
            options |= self._biases(requests) | self._penalties(requests) | self._allowed(requests)
        seats = draws.seats
        sampled = kernels.sample(
            draws.logits,
            draws.temperature,
            draws.seeds,
            draws.num_tokens,
            top_k=self._top_k[seats] if traits & _Traits.TOP_K else None,
            top_p=self._top_p[seats] if traits & _Traits.TOP_P else None,
            min_p=self._min_p[seats] if traits & _Traits.MIN_P else None,
            **options,
        )
        return Draw(sampled, rows, bool(traits & _Traits.LOGPROBS))

    def _biases(self, requests: Sequence[Request]) -> dict[str, Any]:
        """logit_bias, and -inf for stop tokens while the output is shorter than min_tokens."""
        biases: list[dict[int, float]] = []
        for request in requests:
            bias = dict(request.sampling.logit_bias)
            if request.num_output_tokens < request.sampling.min_tokens and not _must_stop(request):
                bias |= dict.fromkeys(request.stop_token_ids, -np.inf)
            biases.append(bias)
        width = max(map(len, biases))
        if width == 0:
            return {}
        tokens = np.full((len(biases), width), -1, dtype=np.int32)
        values = np.zeros((len(biases), width), dtype=np.float32)
        for row, bias in enumerate(biases):
            tokens[row, : len(bias)] = list(bias)
            values[row, : len(bias)] = list(bias.values())
        return {"bias_tokens": self._to_device(tokens), "bias_values": self._to_device(values)}

    def _penalties(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Penalties, with what each penalised request has in prompt and output."""
        penalised = [row for row, request in enumerate(requests) if request.sampling.needs_penalties]
        if not penalised:
            return {}
        seen = []
        for row in penalised:
            tokens = np.array(requests[row].token_ids, dtype=np.int32)
            in_output = np.arange(len(tokens)) >= requests[row].num_prompt_tokens
            distinct, inverse = np.unique(tokens, return_inverse=True)
            seen.append((distinct, np.bincount(inverse, weights=in_output, minlength=len(distinct)).astype(np.int32)))
        width = max(len(distinct) for distinct, _ in seen)
        lists = np.zeros((2, len(seen), width), dtype=np.int32)
        for slot, (distinct, counts) in enumerate(seen):
            lists[0, slot, : len(distinct)], lists[1, slot, : len(distinct)] = distinct, counts
        slots = np.full(len(requests), -1, dtype=np.int32)
        slots[penalised] = np.arange(len(penalised))
        columns = {}
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            values = np.array([getattr(request.sampling, name) for request in requests])
            # a penalty beyond float32 is as good as its largest number
            columns[name] = self._to_device(values.clip(-_LARGEST, _LARGEST).astype(np.float32))
        return columns | {
            "seen_tokens": self._to_device(lists[0]),
            "seen_counts": self._to_device(lists[1]),
            "seen_lengths": self._to_device(np.array([len(distinct) for distinct, _ in seen], dtype=np.int32)),
            "slots": self._to_device(slots),
        }

    def _allowed(self, requests: Sequence[Request]) -> dict[str, Any]:
        """A bit a token for the rows whose requests have a constraint; all bits for the others."""
        if all(request.constraint is None for request in requests):
            return {}
        words = -(-self._vocab_size // 32)
        masks = np.full((len(requests), words * 4), 0xFF, dtype=np.uint8)
        for row, request in enumerate(requests):
            if request.constraint is not None:
                allowed = np.frombuffer(request.constraint.allowed(), dtype=np.uint8)[: words * 4]
                masks[row] = 0
                masks[row, : len(allowed)] = allowed
        return {"allowed_tokens": self._to_device(masks.view("<i4"))}

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _must_stop(request: Request) -> bool:
    """Whether its constraint allows nothing but stop tokens, which min_tokens cannot forbid then."""
    if request.constraint is None:
        return False
    bits = np.unpackbits(np.frombuffer(request.constraint.allowed(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist()) <= request.stop_token_ids
