"""Which batches to measure, so that every part of a profile shows in some of them, and where its tables have points."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from research_engine.simulation.fit import Basis

TILE_EDGES = (1, 2, 4, 8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024, 1025, 1536, 2048,
              3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)  # fmt: skip
"""Tokens of a step: matrix products are cut into tiles of 64, 128 or 256 rows, and time jumps with each new one."""
PARTS = ("dense", "head", "decode", "prefill", "mixed")
_SHORT = 16  # tokens of a chunk that asks next to nothing of attention
_POWERS = tuple(2**power for power in range(20))
_BEFORES = (0, 256, 1024, 4096, 16384, 65536)
_RANDOM_DECODES, _RANDOM_PREFILLS, _RANDOM_MIXED = 12, 12, 24


class Design(NamedTuple):
    """A batch to measure.

    Attributes:
        part: what it is to show.
        decodes: contexts of rows of one token, the new token included.
        chunks: (tokens, tokens computed before, whether a token is drawn) of the other rows.
    """

    part: str
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int, bool], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(tokens for tokens, _, _ in self.chunks)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def longest(self) -> int:
        """Most tokens of a row, computed ones included."""
        return max((*self.decodes, *(tokens + before for tokens, before, _ in self.chunks)))


@dataclass(frozen=True)
class Limits:
    """What the engine can hold: rows and tokens of a step, tokens of a request, blocks, and slots of a block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def allow(self, design: Design, steps: int) -> bool:
        """Whether the design fits, with `steps` more tokens for each row that stays."""
        kept = [*(kv + steps + 1 for kv in design.decodes), *(t + k + 1 for t, k, _ in design.chunks)]
        return (
            design.num_rows <= self.max_num_seqs
            and design.num_tokens <= self.max_num_batched_tokens
            and max(kept) < self.max_model_len
            and sum(-(-tokens // self.block_size) for tokens in kept) <= self.num_blocks
        )


def make_designs(limits: Limits, *, steps: int, seed: int) -> list[Design]:
    """Every design that fits, in a random order in which each beginning holds all parts.

    Args:
        steps: that a row of one token has to last.
        seed: of the order and of the designs between the tables' points.
    """
    rng = random.Random(seed)
    made = dict.fromkeys(design for design in _all(limits, rng) if limits.allow(design, steps))
    by_part: dict[str, list[Design]] = {part: [] for part in PARTS}
    for design in made:
        by_part[design.part].append(design)
    placed = []
    for designs in by_part.values():
        rng.shuffle(designs)
        placed += [((at + rng.random()) / len(designs), design) for at, design in enumerate(designs)]
    return [design for _, design in sorted(placed)]


def basis_of(designs: Sequence[Design]) -> Basis:
    """The tables' points: the tile edges, powers of two and grid that the designs cover."""
    tokens, rows = max(design.num_tokens for design in designs), max(len(d.decodes) for d in designs)
    edges = [edge for edge in TILE_EDGES if edge < tokens]
    powers = [power for power in _POWERS[::2] if power < rows]
    grid = [design.chunks[0] for design in designs if design.part == "prefill"] or [(1, 0, False)]
    most, before = max(t for t, _, _ in grid), max(k for _, k, _ in grid)
    chunks = [power for power in _POWERS[4::2] if power < most] or [1]
    befores = [known for known in _BEFORES if known < before / 2]
    return Basis(
        dense=(*map(float, edges), float(tokens)),
        head=(*map(float, powers), float(max(rows, 1))),
        chunks=(*map(float, chunks), float(most)) if most > chunks[-1] else tuple(map(float, chunks)),
        befores=(*map(float, befores), float(before)) if before else (0.0,),
    )


def _all(limits: Limits, rng: random.Random) -> Iterator[Design]:
    most_tokens, most_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    slots = limits.num_blocks * limits.block_size
    for tokens in sorted({*(edge for edge in TILE_EDGES if edge < most_tokens), most_tokens}):
        if tokens <= most_rows:
            yield Design("dense", decodes=(2,) * tokens)
        rows = min(most_rows, -(-tokens // _SHORT))
        if tokens >= 2 * rows:
            each, longer = divmod(tokens, rows)
            yield Design("dense", chunks=tuple((each + (row < longer), 0, False) for row in range(rows)))
    row_counts = sorted({*(power for power in _POWERS if power < most_rows), most_rows})
    for rows in row_counts:
        for draws in (True, False):
            yield Design("head", chunks=((4, 0, draws),) * rows)
    for rows in row_counts:
        for context in (*(64 * 4**k for k in range(8)), limits.max_model_len - 64):
            if rows * context <= 0.9 * slots:
                yield Design("decode", decodes=(context,) * rows)
        longest = min(limits.max_model_len - 64, slots // 4)
        if rows > 1 and longest > 64:  # one long context among short ones
            yield Design("decode", decodes=(longest, *(32,) * (rows - 1)))
    for _ in range(_RANDOM_DECODES):
        rows = _log_uniform(rng, 1, most_rows)
        top = _log_uniform(rng, 16, max(17, min(limits.max_model_len - 64, slots // rows)))
        yield Design("decode", decodes=tuple(rng.randint(2, top) for _ in range(rows)))
    longest = min(limits.max_model_len, slots) - 64
    for tokens in sorted({*(power for power in _POWERS[4:] if power < most_tokens), most_tokens}):
        for before in (*(known for known in _BEFORES if known < longest), longest - tokens):
            yield Design("prefill", chunks=((tokens, max(0, before), False),))
    for _ in range(_RANDOM_PREFILLS):
        tokens = _log_uniform(rng, 2, most_tokens)
        yield Design("prefill", chunks=((tokens, rng.randint(0, max(0, longest - tokens)), False),))
    for _ in range(_RANDOM_MIXED):
        rows = _log_uniform(rng, 1, max(1, most_rows - 2))
        top = _log_uniform(rng, 16, max(17, min(limits.max_model_len - 64, slots // (2 * rows))))
        tokens = _log_uniform(rng, 2, max(2, most_tokens - rows))
        before = rng.choice((0, 0, rng.randint(0, max(0, longest // 2))))
        decodes = tuple(rng.randint(2, top) for _ in range(rows))
        yield Design("mixed", decodes, ((tokens, before, rng.random() < 0.5),))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))
