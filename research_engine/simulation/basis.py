"""What the device's time of a step is made of, as numbers that a linear fit multiplies by its unknowns.

    decode graph   table(padded rows)   + c sum(kv) + d max(kv)
    token graph    table(padded tokens) + [a + b n + c sum(kv) + d max(kv)] + rate(chunk, kv) pairs + e max(kv)
    launched       base + ramps(tokens) + ramps(draws) + the same attention
    block moves    latency + blocks x time

kv are the contexts of the n rows of one token, pairs the causal query-key pairs of the other rows, whose rate is
interpolated over a grid. Ramps are piecewise linear and never fall; a graph's table may, since a library chooses other
kernels for another size, and a larger graph can be the quicker one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .attention_cost import AttentionFormula
from .cost_model import Work, longest_prefill
from .curve import Curve
from .profiled import Profile
from .step_kind import NO_GRAPHS, Ladders, StepKind

_SMOOTH = 0.02  # weight of "neighbouring rates are alike", beside 1 of a step


@dataclass(frozen=True)
class Basis:
    """Where the profile's tables have their points; all ascending.

    Args:
        dense: numbers of tokens of launched steps.
        head: numbers of rows drawn, above 0.
        chunks, befores: tokens of a chunk, and tokens computed before it.
        ladders: sizes of the executor's graphs.
        decode_graph, token_graph: those of the sizes that have a point; none leaves the table out.
    """

    dense: tuple[float, ...]
    head: tuple[float, ...] = (1.0,)
    chunks: tuple[float, ...] = (1.0,)
    befores: tuple[float, ...] = (0.0,)
    ladders: Ladders = NO_GRAPHS
    decode_graph: tuple[float, ...] = ()
    token_graph: tuple[float, ...] = ()

    def features(self, work: Work) -> list[float]:
        """What each unknown is multiplied by, in seconds of the device."""
        kind, size = self.ladders.placed(work)
        dense, head = [0.0] * len(self.dense), [0.0] * len(self.head)
        graphs = {StepKind.DECODE_GRAPH: self.decode_graph, StepKind.TOKEN_GRAPH: self.token_graph}
        tables = {own: [0.0] * len(knots) for own, knots in graphs.items()}
        if kind is StepKind.LAUNCHED:
            dense = [1.0 if work.tokens else 0.0, *ramps(work.tokens, self.dense)]
            head = ramps(work.draws, (0.0, *self.head))
        else:
            for at, share in _weights(size, graphs[kind]):
                tables[kind][at] = share
        apart = 0.0 if kind is StepKind.DECODE_GRAPH else 1.0  # a decode graph's table holds what a and b are
        decode = [apart * (work.decodes > 0), apart * work.decodes, work.decode_kv, work.decode_kv_max]
        longest = longest_prefill(work.prefills)
        rates = np.zeros((len(self.chunks), len(self.befores)))
        for tokens, before in work.prefills:
            pairs = tokens * (before + (tokens + 1) / 2)
            for row, share in _weights(tokens, self.chunks):
                for column, other in _weights(before, self.befores):
                    rates[row, column] += pairs * share * other
        moved, copied = work.blocks_moved, work.blocks_copied
        moves = [float(moved > 0), moved, float(copied > 0), copied]
        return [*tables[StepKind.DECODE_GRAPH], *tables[StepKind.TOKEN_GRAPH], *dense, *head, *decode, longest,
                *moves, *rates.ravel()]  # fmt: skip

    def smoothness(self, typical_rate: float) -> np.ndarray:
        """Rows, one a pair of neighbours in the grid of rates, that ask for equal rates."""
        first = len(self.decode_graph) + len(self.token_graph) + len(self.dense) + len(self.head) + 9
        grid = first + np.arange(len(self.chunks) * len(self.befores)).reshape(len(self.chunks), len(self.befores))
        rows = []
        for left, right in (*zip(grid[:-1].ravel(), grid[1:].ravel(), strict=True),
                            *zip(grid[:, :-1].ravel(), grid[:, 1:].ravel(), strict=True)):  # fmt: skip
            row = np.zeros(first + grid.size)
            row[left], row[right] = _SMOOTH / typical_rate, -_SMOOTH / typical_rate
            rows.append(row)
        return np.array(rows).reshape(len(rows), first + grid.size)

    def profile(self, values: Iterable[float], model: str, machine: Mapping[str, str]) -> Profile:
        """The profile whose unknowns are `values`, without host time."""
        at = iter(float(value) for value in values)
        graphs = [Curve([(size, next(at)) for size in sizes]) if sizes else None
                  for sizes in (self.decode_graph, self.token_graph)]  # fmt: skip
        dense = heights(next(at), [next(at) for _ in self.dense[1:]], self.dense)
        head = heights(0.0, [next(at) for _ in self.head], (0.0, *self.head))
        a, b, c, d, e = (next(at) for _ in range(5))
        move, copy = (next(at), next(at)), (next(at), next(at))
        rates: dict[tuple[float, ...], float] = {(t, k): next(at) for t in self.chunks for k in self.befores}
        return Profile(
            model=model,
            machine=machine,
            dense=dense,
            head=head,
            attention=AttentionFormula(a, b, c, d, rates, e),
            ladders=Ladders(self.ladders.decode if self.decode_graph else (),
                            self.ladders.tokens if self.token_graph else ()),
            decode_graph=graphs[0],
            token_graph=graphs[1],
            block_move=move,
            block_copy=copy,
        )  # fmt: skip


def ramps(value: float, knots: Sequence[float]) -> list[float]:
    """How much of each piece between knots lies below `value`; the last piece goes on beyond its end."""
    pieces = [min(max(value - left, 0.0), right - left) for left, right in pairwise(knots)]
    if pieces and value > knots[-1]:
        pieces[-1] = value - knots[-2]
    return pieces


def heights(base: float, slopes: Sequence[float], knots: Sequence[float]) -> Curve:
    """The curve that starts at `base` and has these slopes between knots."""
    rises = np.cumsum(np.array(slopes) * np.diff(knots))
    return Curve(zip(knots, [base, *(float(y) for y in base + rises)], strict=True))


def _weights(value: float, points: Sequence[float]) -> list[tuple[int, float]]:
    """(index, share) of the points that linear interpolation takes at `value`; constant beyond the ends."""
    if value <= points[0]:
        return [(0, 1.0)]
    if value >= points[-1]:
        return [(len(points) - 1, 1.0)]
    right = next(at for at, point in enumerate(points) if point > value)
    share = (value - points[right - 1]) / (points[right] - points[right - 1])
    return [(right - 1, 1.0 - share), (right, share)]
