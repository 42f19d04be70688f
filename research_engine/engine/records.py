"""What every step and every request leaves behind.

Metrics, traces, plots, calibration and replay read these records and nothing else.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from .contract import Batch, PreemptionRecord
from .kv_cache import KVCache
from .queues import RequestQueues
from .request import Request


@dataclass(slots=True)
class StepRecord:
    """One step. The first four lists run parallel, one entry a batch row, in batch order.

    Attributes:
        step: number of the step.
        started, committed, executed, finished: clock seconds when scheduling began, the plan was committed, the
            executor's result was there, and the step's update ended. Tokens of a step come out at `executed`. With
            overlap a step begins before the one before it has executed, and `executed` is NaN until it has.
        request_ids: whose row.
        starts: tokens already computed before the step.
        num_tokens: tokens computed in it.
        drew: whether a token came out.
        num_running, num_waiting: after the step.
        blocks_used, blocks_cached, blocks_free: device blocks held by requests, kept for the prefix cache alone, empty.
        slots_stored: token slots of used blocks that hold a token, shared ones counted once.
        preemptions: in the plan's order.
        blocks_copied, blocks_swapped_in, blocks_swapped_out: block moves.
        blocks_held: blocks that each row's request holds after the step, 0 once it ended; empty under the reservation
            `paged`, where they are what its tokens need.
    """

    step: int
    started: float
    committed: float
    executed: float
    finished: float
    request_ids: list[str]
    starts: list[int]
    num_tokens: list[int]
    drew: list[bool]
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    slots_stored: int
    preemptions: list[PreemptionRecord]
    blocks_copied: int
    blocks_swapped_in: int
    blocks_swapped_out: int
    blocks_held: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch, cache: KVCache, finished: float, queues: RequestQueues) -> StepRecord:
        requests, starts, num_tokens, drew, _ = zip(*batch.rows, strict=True) if batch.rows else ((),) * 5
        return cls(
            step=batch.step,
            started=batch.started,
            committed=batch.committed,
            executed=batch.executed,
            finished=finished,
            request_ids=[request._id for request in requests],
            starts=list(starts),
            num_tokens=list(num_tokens),
            drew=list(drew),
            num_running=len(queues.running),
            num_waiting=queues.num_waiting,
            blocks_used=cache.num_used_blocks,
            blocks_cached=cache.num_cached_blocks,
            blocks_free=cache.num_blocks - cache.num_used_blocks - cache.num_cached_blocks,
            slots_stored=cache.slots_stored,
            preemptions=batch.preempted,
            blocks_copied=len(batch.copies),
            blocks_swapped_in=len(batch.swap_in),
            blocks_swapped_out=len(batch.swap_out),
            blocks_held=[request.num_blocks for request in requests] if cache.reserves else [],
        )

    def copy(self) -> StepRecord:
        """One with lists of its own, for a policy to see: whatever is done with it, the records stay as they are."""
        return replace(
            self,
            request_ids=self.request_ids.copy(),
            starts=self.starts.copy(),
            num_tokens=self.num_tokens.copy(),
            drew=self.drew.copy(),
            preemptions=self.preemptions.copy(),
            blocks_held=self.blocks_held.copy(),
        )

    def complete(self, executed: float, finished: float, emitted: Container[str]) -> None:
        """Mutates: of a step that was in flight, what was not known when it was handed over.

        Args:
            emitted: requests of which a token came out; others had ended in the meantime.
        """
        self.executed, self.finished = executed, finished
        self.drew = [drew and name in emitted for drew, name in zip(self.drew, self.request_ids, strict=True)]


@dataclass(slots=True)
class RequestRecord:
    """One ended request; times are clock seconds, None where the event never came.

    A refused request has finish_reason "refused" and arrival alone.
    """

    request_id: str
    client: str
    priority: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finish_time: float | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        return cls(
            request_id=request.id,
            client=request.client,
            priority=request.priority,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            last_token_time=request.last_token_time,
            finish_time=request.finish_time,
            finish_reason=request.finish_reason or "",
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            max_tokens=request.max_num_tokens - request.num_prompt_tokens,
            cached_tokens=request.num_cached_tokens,
            recomputed_tokens=request.num_recomputed_tokens,
            preemptions=request.num_preemptions,
        )


@dataclass
class Records:
    """The records of a run, in memory, in the order in which they came."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)

    def add_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def add_request(self, record: RequestRecord) -> None:
        self.requests.append(record)
