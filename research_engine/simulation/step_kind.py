"""How a step reaches a device: as a CUDA graph of one of two kinds, padded to a size of a ladder, or kernel by kernel.

A graph of a larger batch takes longer whether its rows are filled or not, and handing a graph over takes the host a
tenth of what launching every kernel takes; so steps of nearly the same tokens may differ by a third in time.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import NamedTuple

from .cost_model import Work


class StepKind(str, Enum):
    """Value: its name in a profile."""

    DECODE_GRAPH = "decode graph"  # one token a row, every row draws
    TOKEN_GRAPH = "token graph"  # any other step of few tokens
    LAUNCHED = "launched"  # kernel by kernel; on a CPU every step


class Ladders(NamedTuple):
    """Sizes of the graphs that an executor has, ascending; none where it launches everything.

    Attributes:
        decode: rows of decoding steps.
        tokens: tokens of any other steps.
    """

    decode: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def kind(self, work: Work) -> StepKind:
        """How a step runs."""
        return self.placed(work)[0]

    def placed(self, work: Work) -> tuple[StepKind, int]:
        """How a step runs, and the size that it is padded to: rows, or tokens."""
        tokens = work.tokens
        if tokens == work.sequences == work.draws:
            if self.decode and 0 < tokens <= self.decode[-1]:
                return StepKind.DECODE_GRAPH, self.decode[bisect_left(self.decode, tokens)]
        elif self.tokens and 0 < tokens <= self.tokens[-1]:
            return StepKind.TOKEN_GRAPH, self.tokens[bisect_left(self.tokens, tokens)]
        return StepKind.LAUNCHED, tokens


NO_GRAPHS = Ladders()
