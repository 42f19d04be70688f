"""Which batches to measure, so that every part of a profile shows in some of them, and where its tables have points."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from research_engine.simulation.basis import Basis
from research_engine.simulation.cost_model import Work
from research_engine.simulation.step_kind import NO_GRAPHS, Ladders, StepKind

TILE_EDGES = (1, 2, 4, 8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024, 1025, 1536, 2048,
              3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)  # fmt: skip
"""Tokens of a step: matrix products are cut into tiles of 64, 128 or 256 rows, and time jumps with each new one."""
PARTS = ("decode graph", "token graph", "dense", "head", "decode", "prefill", "mixed")
_SHORT = 16  # tokens of a chunk that asks next to nothing of attention
_POWERS = tuple(2**power for power in range(20))
_BEFORES = (0, 256, 1024, 4096, 16384, 65536)
_RANDOM_DECODES, _RANDOM_PREFILLS, _RANDOM_MIXED = 24, 12, 48
_MOST_CHUNKS = 4  # of a random mixed batch


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
    def num_draws(self) -> int:
        return len(self.decodes) + sum(draws for _, _, draws in self.chunks)

    @property
    def work(self) -> Work:
        """What it asks of a device."""
        alone = [before + 1 for tokens, before, _ in self.chunks if tokens == 1]
        contexts = [*self.decodes, *alone]
        prefills = tuple((tokens, before) for tokens, before, _ in self.chunks if tokens > 1)
        return Work(self.num_tokens, self.num_rows, self.num_draws, len(contexts), sum(contexts),
                    max(contexts, default=0), prefills)  # fmt: skip

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


def make_designs(limits: Limits, ladders: Ladders = NO_GRAPHS, *, steps: int, seed: int) -> list[Design]:
    """Every design that fits, in a random order in which each beginning holds all parts.

    Args:
        ladders: of the executor: each of its graphs is measured, and tile edges only where steps are launched.
        steps: that a row of one token has to last.
        seed: of the order and of the designs between the tables' points.
    """
    rng = random.Random(seed)
    made = dict.fromkeys(design for design in _all(limits, ladders, rng) if limits.allow(design, steps))
    by_part: dict[str, list[Design]] = {part: [] for part in PARTS}
    for design in made:
        by_part[design.part].append(design)
    placed = []
    for designs in by_part.values():
        rng.shuffle(designs)
        placed += [((at + rng.random()) / len(designs), design) for at, design in enumerate(designs)]
    return [design for _, design in sorted(placed)]


def basis_of(designs: Sequence[Design], ladders: Ladders = NO_GRAPHS) -> Basis:
    """The tables' points: the graphs, tile edges, powers of two and grid that the designs cover."""
    placed = [(ladders.placed(design.work), design) for design in designs]
    launched = [design for (kind, _), design in placed if kind is StepKind.LAUNCHED]
    tokens = [design.num_tokens for design in launched] or [1]
    rows = max((design.num_draws for design in launched), default=1)
    graphs = {kind: sorted({float(size) for (own, size), _ in placed if own is kind}) for kind in StepKind}
    edges = sorted({min(tokens), *(edge for edge in TILE_EDGES if edge in tokens)} - {max(tokens)})  # each was measured
    powers = [power for power in _POWERS[::2] if power < rows]
    grid = [design.chunks[0] for design in designs if design.part == "prefill"] or [(1, 0, False)]
    most, before = max(t for t, _, _ in grid), max(k for _, k, _ in grid)
    chunks = [power for power in _POWERS[4::2] if power < most] or [1]
    befores = [known for known in _BEFORES if known < before / 2]
    return Basis(
        dense=(*map(float, edges), float(max(tokens))),
        head=(*map(float, powers), float(max(rows, 1))),
        chunks=(*map(float, chunks), float(most)) if most > chunks[-1] else tuple(map(float, chunks)),
        befores=(*map(float, befores), float(before)) if before else (0.0,),
        ladders=ladders,
        decode_graph=tuple(graphs[StepKind.DECODE_GRAPH]),
        token_graph=tuple(graphs[StepKind.TOKEN_GRAPH]),
    )


def _all(limits: Limits, ladders: Ladders, rng: random.Random) -> Iterator[Design]:
    most_tokens, most_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    slots = limits.num_blocks * limits.block_size
    longest = min(limits.max_model_len, slots) - 64
    for rows in ladders.decode:
        yield Design("decode graph", decodes=(32,) * rows)
        yield Design("decode graph", decodes=tuple(_log_uniform(rng, 64, 1024) for _ in range(rows)))
    for tokens in ladders.tokens:
        answers = min(most_rows - 1, tokens // 2, _log_uniform(rng, 1, most_rows))
        yield Design("token graph", (64,) * answers, ((tokens - answers, 0, True),))
        rows = min(most_rows, tokens // _SHORT)
        yield Design("token graph", chunks=((tokens // rows, 0, True),) * rows)
    launched = max((0, *ladders.tokens)) + 1  # tokens from which on steps with prompts are
    for tokens in sorted({*(edge for edge in TILE_EDGES if edge < most_tokens), launched, most_tokens}):
        if tokens <= most_rows and not ladders.decode:
            yield Design("dense", decodes=(2,) * tokens)
        rows = min(most_rows, -(-tokens // _SHORT))
        if tokens >= max(2 * rows, launched):
            each, longer = divmod(tokens, rows)
            yield Design("dense", chunks=tuple((each + (row < longer), 0, False) for row in range(rows)))
    row_counts = sorted({*(power for power in _POWERS if power < most_rows), most_rows})
    for rows in row_counts:
        each = 4 if rows < most_rows else max(4, -(-launched // rows))
        rest = launched - each * rows  # so many more tokens that all of these are launched
        filler = ((max(2, rest), 0, False),) if rest > 0 else ()
        for draws in (True, False):
            yield Design("head", chunks=(*((each, 0, draws),) * rows, *filler))
    for rows in row_counts:
        for context in (*(64 * 4**k for k in range(8)), limits.max_model_len - 64):
            if rows * context <= 0.9 * slots:
                yield Design("decode", decodes=(context,) * rows)
        most = min(limits.max_model_len - 64, slots // 4)
        if rows > 1 and most > 64:  # one long context among short ones
            yield Design("decode", decodes=(most, *(32,) * (rows - 1)))
    for _ in range(_RANDOM_DECODES):
        rows = _log_uniform(rng, 1, most_rows)
        top = _log_uniform(rng, 16, max(17, min(limits.max_model_len - 64, slots // rows)))
        yield Design("decode", decodes=tuple(rng.randint(2, top) for _ in range(rows)))
    for tokens in sorted({*(power for power in _POWERS[4:] if power < most_tokens), most_tokens}):
        for before in (*(known for known in _BEFORES if known < longest), longest - tokens):
            yield Design("prefill", chunks=((tokens, max(0, before), False),))
    for _ in range(_RANDOM_PREFILLS):
        tokens = _log_uniform(rng, 2, most_tokens)
        yield Design("prefill", chunks=((tokens, rng.randint(0, max(0, longest - tokens)), False),))
    for number in range(_RANDOM_MIXED):  # some decodes, some prompts; every fourth time one prompt goes on after others
        rows = _log_uniform(rng, 1, max(1, most_rows - _MOST_CHUNKS))
        top = _log_uniform(rng, 16, max(17, min(limits.max_model_len - 64, slots // (2 * rows))))
        decodes = tuple(rng.randint(2, top) for _ in range(rows))
        room = max(2, most_tokens - rows)
        prompts = [_log_uniform(rng, 2, max(2, room // _MOST_CHUNKS)) for _ in range(rng.randint(1, _MOST_CHUNKS))]
        if number % 4 == 0:
            before = rng.randint(0, max(0, longest // 2))
            yield Design("mixed", decodes, ((_log_uniform(rng, 2, room), before, rng.random() < 0.5),))
        else:
            yield Design("mixed", decodes, tuple((count, 0, True) for count in prompts))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))
