"""Attention from measurements: a formula where decode and prefill cost the sum of both, a table where they do not.

Kernels with a path of their own for decode rows cost what their decode and prefill parts cost: `AttentionFormula`.
Where one launch serves a mixed batch by the prefill path, decode rows cost more the moment a prompt joins them, and
only measurements of mixed batches say how much: `AttentionTable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .cost_model import Work, longest_prefill, single_prefill
from .curve import Grid

_SECONDS = ("base", "per_row", "per_token", "per_longest", "per_longest_prefill")


class AttentionCost(Protocol):
    """Prices attention of all layers."""

    def seconds(self, work: Work) -> float: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class AttentionFormula:
    """Decode: a + b n + c sum(kv) + d max(kv), nothing without such rows. Prefill: pairs x seconds a pair + e max(kv).

    Few tokens after many take as long as it takes one thread block to go through the context; that is what e says.

    Args:
        base, per_row, per_token, per_longest: a, b, c, d in seconds; n rows of one token.
        prefill: (tokens, tokens computed before) -> seconds a query-key pair; interpolated, and constant beyond.
        per_longest_prefill: e in seconds.
    """

    base: float
    per_row: float
    per_token: float
    per_longest: float
    prefill: Mapping[tuple[float, ...], float]
    per_longest_prefill: float = 0.0

    def __post_init__(self) -> None:
        for name in _SECONDS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"attention {name} = {getattr(self, name)!r}: must be finite seconds >= 0")
        object.__setattr__(self, "_rate", Grid(self.prefill))
        tokens, before = zip(*self.prefill, strict=True)
        object.__setattr__(self, "_most", (max(tokens), max(before)))

    def contexts(self, work: Work) -> float:
        """Of the decode rows, what depends on their contexts alone: c sum(kv) + d max(kv)."""
        return self.per_token * work.decode_kv + self.per_longest * work.decode_kv_max

    def seconds(self, work: Work) -> float:
        seconds = 0.0
        if work.decodes:
            seconds = self.base + self.per_row * work.decodes + self.contexts(work)
        most_tokens, most_before = self._most  # type: ignore[attr-defined]
        for tokens, before in work.prefills:
            rate = self._rate(min(tokens, most_tokens), min(before, most_before))  # type: ignore[attr-defined]
            seconds += rate * tokens * (before + (tokens + 1) / 2)
        return seconds + self.per_longest_prefill * longest_prefill(work.prefills)

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _SECONDS}
        return {"kind": "formula", **own, "prefill": [[*point, rate] for point, rate in self.prefill.items()]}


class AttentionTable:
    """Measured batches of n decode rows with a mean context each, beside one prefill chunk or none; interpolated.

    Several chunks in a step are priced as the one chunk with as many tokens and query-key pairs (`single_prefill`).

    Args:
        rows: (chunk tokens, tokens computed before it, decode rows, mean context of those, seconds of all layers); a
            chunk of 0 tokens is none.

    Raises:
        ValueError: no batch without a chunk, or none with one.
    """

    def __init__(self, rows: Iterable[tuple[float, float, float, float, float]]) -> None:
        self._rows = list(rows)
        alone: dict[tuple[float, ...], float] = {
            (n, kv): seconds for chunk, _, n, kv, seconds in self._rows if not chunk and n
        }
        mixed: dict[tuple[float, ...], float] = {
            (chunk, n, kv, before): seconds for chunk, before, n, kv, seconds in self._rows if chunk
        }
        if not alone or not mixed:
            raise ValueError("an attention table needs batches with a prefill chunk and batches without")
        self._alone, self._mixed = Grid(alone), Grid(mixed)

    def seconds(self, work: Work) -> float:
        mean = work.decode_kv / work.decodes if work.decodes else 0.0
        if not work.prefills:
            return self._alone(work.decodes, mean) if work.decodes else 0.0
        chunk, before = single_prefill(work.prefills)
        if before >= 0:
            return self._mixed(chunk, work.decodes, mean, before)
        # short prompts together: the table's slope below 0, and never less than one of them alone would take
        start = self._mixed(chunk, work.decodes, mean, 0)
        below = 2 * start - self._mixed(chunk, work.decodes, mean, -before)
        largest = max(work.prefills, key=lambda row: row[0] * (row[1] + row[0] / 2))
        return max(below, self._mixed(largest[0], work.decodes, mean, largest[1]))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "table", "rows": [list(row) for row in self._rows]}


def attention_from_json(data: Mapping[str, Any]) -> AttentionCost:
    """What `as_json` gave.

    Raises:
        ValueError: another kind than formula or table.
    """
    if data["kind"] == "formula":
        prefill: dict[tuple[float, ...], float] = {(tokens, before): rate for tokens, before, rate in data["prefill"]}
        return AttentionFormula(**{name: data[name] for name in _SECONDS if name in data}, prefill=prefill)
    if data["kind"] == "table":
        return AttentionTable((c, before, n, kv, seconds) for c, before, n, kv, seconds in data["rows"])
    raise ValueError(f"attention kind {data['kind']!r}: must be formula or table")
