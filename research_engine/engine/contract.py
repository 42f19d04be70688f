"""What the engine, schedulers, executors and clocks promise each other. Schedulers import this module alone.

EngineView -> Scheduler -> SchedulePlan -> (engine commits) -> Batch -> Executor -> StepResult -> (engine updates)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from .block_ledger import BlockLedger
from .config import EngineConfig
from .request import UNKNOWN_TOKEN, Request, Status

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .records import StepRecord as StepRecord  # policies name it in annotations

__all__ = [
    "Batch", "BlockLedger", "Clock", "EngineConfig", "EngineView", "Executor", "Fact", "Pending", "Preemption",
    "PreemptionMode", "Request", "SchedulePlan", "ScheduledRequest", "Scheduler", "Status", "StepResult",
    "TokenLogprobs", "UNKNOWN_TOKEN",
]  # fmt: skip

PreemptionMode = Literal["recompute", "swap"]
Fact = str | float  # what a policy saw; an int is a float here


class Preemption(NamedTuple):
    """A running request gives its blocks back: `recompute` drops them, `swap` moves their contents to host blocks."""

    request_id: str
    mode: PreemptionMode = "recompute"
    reason: str = ""


@dataclass(frozen=True)
class SchedulePlan:
    """What a scheduler wants of one step. A request of which the plan says nothing keeps what it has and pauses.

    Args:
        tokens: request id -> how many of its uncomputed tokens to compute now, at least 1; order is the batch's order.
            A waiting request named here is admitted (a swapped one is brought back).
        preempt: running requests that give way; carried out before anything is admitted.
        reasons: request id -> why it was chosen or passed over. This and the next two are for the decision log alone,
            and wanted only where `view.explains`.
        seen: request id -> name -> what the policy went by: a rank, a counter, blocks needed and free.
        rest: why nobody else was looked at.
        wake_at: for a plan that serves nobody: clock seconds until which the policy wants to wait. It is asked again
            then, or before that when a request arrives or ends. Without it, it is asked again at once.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    preempt: Sequence[Preemption] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    seen: Mapping[str, Mapping[str, Fact]] = field(default_factory=dict)
    rest: str = ""
    wake_at: float | None = None


class EngineView:
    """All that a scheduler may know, read-only, at one moment.

    `explains` says whether reasons are wanted: leave them out where they are not, they cost time.
    `running` is in order of admission. `waiting` has preempted requests first (by arrival), then new ones by arrival.
    """

    __slots__ = (
        "_cache", "_new", "_preempted", "_running", "_running_now", "_waiting_now", "config", "explains", "now", "step",
    )  # fmt: skip

    def __init__(
        self,
        *,
        now: float,
        step: int,
        config: EngineConfig,
        cache: KVCache,
        running: Mapping[str, Request],
        preempted: Mapping[str, Request],
        new: Mapping[str, Request],
        explains: bool = False,
    ) -> None:
        self.now = now
        self.explains = explains
        self.step = step
        self.config = config
        self._cache = cache
        self._running = running
        self._preempted = preempted
        self._new = new
        self._running_now: tuple[Request, ...] | None = None
        self._waiting_now: tuple[Request, ...] | None = None

    @property
    def running(self) -> tuple[Request, ...]:
        if self._running_now is None:
            self._running_now = tuple(self._running.values())
        return self._running_now

    @property
    def waiting(self) -> tuple[Request, ...]:
        if self._waiting_now is None:
            self._waiting_now = tuple(self.waiting_in_turn())
        return self._waiting_now

    def waiting_in_turn(self) -> Iterator[Request]:
        """`waiting`, one after the other: for whoever looks at the first few of a long queue."""
        if self._preempted:
            yield from sorted(self._preempted.values(), key=lambda r: (r.arrival_time, r.index))
        yield from self._new.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._new)

    @property
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        return self.config.max_num_batched_tokens

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, cached ones that nobody uses included."""
        return self._cache.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return self._cache.num_free_host_blocks

    def cached_tokens(self, request: Request) -> int:
        """Tokens that admitting this waiting request now would find computed (prefix cache, sibling or swapped KV)."""
        return self._cache.cached_tokens(request)

    def uncomputed_tokens(self, request: Request) -> int:
        """Tokens still to compute if it were scheduled now: what is known less what is computed or cached."""
        if request._status is Status.RUNNING:
            return len(request._tokens) - request._computed
        return len(request._tokens) - self._cache.cached_tokens(request)

    def blocks_freed_by(self, request: Request) -> int:
        """Blocks that preempting this running request alone would free (shared ones stay)."""
        return self._cache.blocks_freed_by(request)

    def ledger(self) -> BlockLedger:
        """A what-if account of blocks, exactly as the engine will keep it when it commits the plan."""
        return self._cache.ledger()


@runtime_checkable
class Scheduler(Protocol):
    """The whole contract of a policy. Subclass it and the three events come free."""

    def schedule(self, view: EngineView) -> SchedulePlan:
        """Choose who gets how many tokens in the step to come, and who gives way."""
        ...

    def on_arrival(self, request: Request) -> None:
        """A request joined the queue."""

    def on_step(self, record: StepRecord) -> None:
        """A step was made; `record` says who computed how many tokens. With overlap its last two times are unknown."""

    def on_finish(self, request: Request) -> None:
        """A request ended, by stop, length or abort; with overlap, its last token may still be under way."""


class ScheduledRequest(NamedTuple):
    """One row of a batch.

    Attributes:
        request: whose tokens `token_ids[start : start + num_tokens]` are computed.
        start: tokens already in the cache.
        num_tokens: tokens to compute now.
        draws: whether these reach the last known token, so that a new one is drawn.
        first_changed_block: block-table entries before this index are as they were when the request last ran.
    """

    request: Request
    start: int
    num_tokens: int
    draws: bool
    first_changed_block: int


@dataclass
class Batch:
    """A committed plan. Block moves come first, in this order: swap_out, swap_in, copies; then the rows are computed.

    Attributes:
        step: number of the step.
        started, committed, executed: clock seconds when scheduling began, when the plan was committed and when the
            result was there.
        rows: in the plan's order.
        num_tokens: tokens of all rows.
        swap_out: (device block, host block) pairs.
        swap_in: (host block, device block) pairs.
        copies: (source, destination) device block pairs, for copy on write.
        admitted: requests that were waiting (or swapped) until this step.
        received: (request, n): the KV of its first n tokens was computed elsewhere, and the executor has to bring it
            into the request's blocks before it computes the rows.
        preempted: what each preemption cost.
        wake_at: of an empty batch: clock seconds until which the policy wants to wait; None to be asked at once.
    """

    step: int
    rows: list[ScheduledRequest]
    num_tokens: int
    started: float = 0.0
    committed: float = 0.0
    executed: float = math.nan
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    received: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[PreemptionRecord] = field(default_factory=list)
    wake_at: float | None = None


class PreemptionRecord(NamedTuple):
    """One preemption: whom, how, why and at what price (tokens_lost are to be computed again)."""

    request_id: str
    mode: PreemptionMode
    reason: str
    blocks_freed: int
    tokens_lost: int
    blocks_swapped: int


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, its rank (1 = most probable), and the most probable tokens as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass
class StepResult:
    """What an executor made of a batch.

    Attributes:
        token_ids: one per row: the drawn token, or -1 where the row draws none.
        logprobs: row index -> log-probabilities of the drawn token, where the request asked for them.
        prompt_logprobs: row index -> log-probabilities of the prompt tokens start + 1 ... that this row predicts.
    """

    token_ids: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)

    def wait(self) -> StepResult:
        """Itself: a result that is there is a Pending one, too."""
        return self


class Pending(Protocol):
    """A step that was handed to a device; the device works on steps in the order in which they came."""

    def wait(self) -> StepResult:
        """The result, once it is there. Called once."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Computes batches: on a CPU, a GPU, several GPUs, or in simulated time."""

    def execute(self, batch: Batch) -> Pending:
        """Carry out the block moves, compute the rows, draw tokens; may return before that is done.

        Must not change any request. A row's last token may be UNKNOWN_TOKEN: it is the one drawn for that request by
        the batch before, which the executor alone knows.
        """
        ...

    def shutdown(self) -> None:
        """Give memory and processes back; further calls are errors."""
        ...


@runtime_checkable
class Clock(Protocol):
    """Real or virtual seconds since the run began."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...
