"""What the KV cache held, what of it was waste, and what preemption cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def kv_usage(records: Records, *, block_size: int) -> KVUsage:
    """Memory use as in Figure 2 of the PagedAttention paper (SOSP'23), for a cache of equal blocks.

    A step's state counts for as long as the step lasts. `reserved` and `internal` are told apart by what the request
    held when it ended: its last token is never stored.

    Args:
        block_size: token slots per block.
    """
    final = {r.request_id: r.prompt_tokens + r.output_tokens - 1 for r in records.requests if r.output_tokens}
    finishes = {r.request_id: r.finish_time for r in records.requests if r.finish_time is not None}
    stored = never = allocated = held = duration = peak = 0.0
    computed: dict[str, int] = {}  # tokens in the cache of each request that holds blocks
    for step in records.steps:
        for gone in step.preemptions:
            computed.pop(gone.request_id, None)
        for name, start, num_tokens in zip(step.request_ids, step.starts, step.num_tokens, strict=True):
            computed[name] = start + num_tokens
        for name in [n for n in computed if finishes.get(n, math.inf) <= step.executed]:
            del computed[
                name
            ]  # the record shows the cache at the step's end, when ended requests have given theirs back
        seconds = step.finished - step.started
        slots = step.blocks_used * block_size
        total = step.blocks_used + step.blocks_cached + step.blocks_free
        empty = slots - step.slots_stored
        unfilled = 0
        for name, tokens in computed.items():
            capacity = -(-tokens // block_size) * block_size
            unfilled += capacity - max(tokens, min(capacity, final.get(name, tokens)))
        stored += seconds * step.slots_stored
        never += seconds * min(unfilled, empty)
        allocated += seconds * slots
        held += seconds * step.blocks_used / total
        duration += seconds
        peak = max(peak, step.blocks_used / total)
    if not duration or not allocated:
        return KVUsage(*[math.nan] * 5)
    used, internal = stored / allocated, never / allocated
    return KVUsage(used, 1 - used - internal, internal, held / duration, peak)


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
