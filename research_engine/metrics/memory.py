"""What the KV cache held, what of it was waste, and what preemption cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from research_engine.engine.records import Records


@dataclass(frozen=True)
class KVUsage:
    """Time-weighted means over the steps of a run; fractions.

    Attributes:
        utilization: token slots that hold a token / token slots allocated.
        reserved: allocated slots that are empty now and that their request fills before it ends / allocated.
        internal: allocated slots that are never filled / allocated.
        occupancy: blocks that requests hold / blocks of the cache.
        peak_occupancy: the largest occupancy of any step; no mean.

    utilization + reserved + internal = 1. Blocks of one size leave no external fragmentation. NaN for a run without
    steps.
    """

    utilization: float
    reserved: float
    internal: float
    occupancy: float
    peak_occupancy: float


@dataclass(frozen=True)
class KVSplit:
    """Where the memory of the KV cache went, as Figure 2 of the PagedAttention paper (SOSP'23) splits it; fractions.

    Attributes:
        token_states: slots that hold a token.
        reserved: slots held that are empty now and that their request fills before it ends.
        internal: slots held that are never filled.
        external: slots that nobody holds although requests wait. Blocks of one size are never too scattered to be used,
            so these are too few for what the next request must hold, or a limit or watermark of the policy keeps them.

    They sum to 1: slots held, and those of `external`, both weighted by time. NaN for a run without steps.
    """

    token_states: float
    reserved: float
    internal: float
    external: float


@dataclass(frozen=True)
class PreemptionCost:
    """What preemptions cost in a run.

    Attributes:
        events: preemptions.
        tokens_lost: computed tokens whose KV was dropped.
        tokens_recomputed: tokens that were in fact computed more than once; fewer than lost where the prefix cache or
            an abort spares the work.
        blocks_swapped: blocks moved to the host and back.
        bytes_swapped: the same in bytes; NaN when the size of a block is not given.
    """

    events: int
    tokens_lost: int
    tokens_recomputed: int
    blocks_swapped: int
    bytes_swapped: float

    @property
    def tokens_recomputed_per_event(self) -> float:
        return self.tokens_recomputed / self.events if self.events else 0.0

    @property
    def bytes_swapped_per_event(self) -> float:
        return self.bytes_swapped / self.events if self.events else 0.0


class _Moment(NamedTuple):
    """The cache at the end of one step, in token slots, and for how many seconds that counts."""

    seconds: float
    held: int
    stored: int
    never: int  # held and never filled
    total: int
    waits: bool  # requests wait


def kv_usage(records: Records, *, block_size: int) -> KVUsage:
    """How well the blocks that requests held were used.

    A step's state counts for as long as the step lasts. `reserved` and `internal` are told apart by what the request
    held when it ended: its last token is never stored.

    Args:
        block_size: token slots per block.
    """
    stored = never = held = occupied = duration = peak = 0.0
    for now in _moments(records, block_size):
        stored += now.seconds * now.stored
        never += now.seconds * now.never
        held += now.seconds * now.held
        occupied += now.seconds * now.held / now.total
        duration += now.seconds
        peak = max(peak, now.held / now.total)
    if not duration or not held:
        return KVUsage(*[math.nan] * 5)
    used, internal = stored / held, never / held
    return KVUsage(used, 1 - used - internal, internal, occupied / duration, peak)


def kv_split(records: Records, *, block_size: int) -> KVSplit:
    """Token states, reserved slots, internal and external fragmentation of a run; see `KVSplit`.

    Args:
        block_size: token slots per block.
    """
    stored = never = held = unusable = 0.0
    for now in _moments(records, block_size):
        stored += now.seconds * now.stored
        never += now.seconds * now.never
        held += now.seconds * now.held
        unusable += now.seconds * (now.total - now.held) * now.waits
    whole = held + unusable
    if not whole:
        return KVSplit(*[math.nan] * 4)
    return KVSplit(stored / whole, (held - stored - never) / whole, never / whole, unusable / whole)


def _moments(records: Records, block_size: int) -> Iterator[_Moment]:
    final = {r.request_id: r.prompt_tokens + r.output_tokens - 1 for r in records.requests if r.output_tokens}
    finishes = {r.request_id: r.finish_time for r in records.requests if r.finish_time is not None}
    holding: dict[str, tuple[int, int]] = {}  # tokens and slots of each request that holds blocks
    for step in records.steps:
        for gone in step.preemptions:
            holding.pop(gone.request_id, None)
        for index, (name, start, num_tokens) in enumerate(
            zip(step.request_ids, step.starts, step.num_tokens, strict=True)
        ):
            tokens = start + num_tokens
            blocks = step.blocks_held[index] if step.blocks_held else -(-tokens // block_size)
            holding[name] = tokens, blocks * block_size
        for name in [n for n in holding if finishes.get(n, math.inf) <= step.executed]:
            del holding[name]  # at the step's end, which the record shows, it has given its blocks back
        held = step.blocks_used * block_size
        total = (step.blocks_used + step.blocks_cached + step.blocks_free) * block_size
        unfilled = sum(
            slots - max(tokens, min(slots, final.get(name, tokens))) for name, (tokens, slots) in holding.items()
        )
        never = min(unfilled, held - step.slots_stored)
        yield _Moment(step.finished - step.started, held, step.slots_stored, never, total, step.num_waiting > 0)


def preemption_cost(records: Records, *, bytes_per_block: float | None = None) -> PreemptionCost:
    """Sum of what the preemptions of a run cost.

    Args:
        bytes_per_block: keys and values of one block over all layers; leaves bytes_swapped NaN when None.
    """
    events = [event for step in records.steps for event in step.preemptions]
    moved = sum(step.blocks_swapped_in + step.blocks_swapped_out for step in records.steps)
    return PreemptionCost(
        events=len(events),
        tokens_lost=sum(event.tokens_lost for event in events),
        tokens_recomputed=sum(record.recomputed_tokens for record in records.requests),
        blocks_swapped=moved,
        bytes_swapped=math.nan if bytes_per_block is None else moved * bytes_per_block,
    )
