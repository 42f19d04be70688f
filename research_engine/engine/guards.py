"""What stands between a policy and the engine: its calls with their errors named, and an end to livelock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .clock import Stopwatch
from .config import EngineConfig
from .contract import Batch, Clock, EngineView, Request, SchedulePlan, Scheduler
from .errors import PlanError, PolicyError, PolicyFault, StalledError
from .fallback import plan_by_arrival
from .foreign import shown, words_of
from .kv_cache import KVCache
from .overdue import Overdue, where_in
from .queues import RequestQueues
from .records import StepRecord

_PATIENCE, _LEAST_PATIENCE = 10, 10.0  # times schedule_limit, and seconds, for a call that may never return
Subject = TypeVar("Subject")
Answer = TypeVar("Answer")


@dataclass
class FaultLog:
    """Faults of a policy that the engine went over: how many, and the latest of them."""

    total: int = 0
    latest: deque[PolicyFault] = field(default_factory=lambda: deque(maxlen=100))

    def add(self, fault: PolicyFault) -> None:
        self.total += 1
        self.latest.append(fault)


class GuardedPolicy:
    """Calls a scheduler; what goes wrong in it becomes a PolicyError that names policy, step, request and rule.

    Args:
        scheduler: trusted in nothing.
        config: `on_fault` and `schedule_limit` are read.

    Attributes:
        faults: those that were gone over.
        calls: of the policy so far; is_called: the latest of them has not returned.
        patience: seconds after which it is taken for one that never will; see overdue.py.
    """

    def __init__(self, scheduler: Scheduler, config: EngineConfig) -> None:
        self.scheduler = scheduler
        self.faults = FaultLog()
        self._goes_on = config.on_fault == "go_on"
        self._limit = config.schedule_limit
        self.calls, self.is_called = 0, False
        self.patience = max(_LEAST_PATIENCE, _PATIENCE * self._limit)
        self._stopwatch = Stopwatch()
        self._event_error: PolicyError | None = None
        # a policy that has no ear for them needs no copy of every step's record
        self._hears_steps = getattr(type(scheduler), "on_step", None) is not Scheduler.on_step

    @property
    def name(self) -> str:
        return type(self.scheduler).__name__

    def schedule(self, view: EngineView) -> SchedulePlan:
        """Ask for a plan.

        Raises:
            PolicyError: it raised, took longer than schedule_limit, did not return, or returned no SchedulePlan; with
                "go_on" the step is planned by arrival instead.
        """
        self._stopwatch.start()
        try:
            plan = self._call(self.scheduler.schedule, view)
        except (Exception, SystemExit, Overdue) as error:
            fault = self._error(f"schedule {self._told(error)}", view.step, error)
        else:
            took = self._stopwatch.seconds()
            if isinstance(plan, SchedulePlan) and took <= self._limit:
                return plan
            if isinstance(plan, SchedulePlan):
                rule = (
                    f"schedule took {took:.3f} s, schedule_limit is {self._limit:g} s; a policy decides at "
                    "once and never sleeps: to wait for a time, return a SchedulePlan with wake_at"
                )
            else:
                rule = f"schedule returned {shown(plan)}; it must return a SchedulePlan"
            fault = self._error(rule, view.step)
        return self.instead(fault, view)

    def committed(
        self, plan: SchedulePlan, view: EngineView, cache: KVCache, live: Mapping[str, Request]
    ) -> tuple[SchedulePlan, Batch]:
        """Commit a plan, or the one in its place when it breaks a rule and the engine is to go on.

        Raises:
            PlanError: it broke a rule; nothing was changed.
        """
        try:
            return plan, cache.commit(plan, live, view.step)
        except PlanError as error:
            plan = self.instead(error, view)
            return plan, cache.commit(plan, live, view.step)

    def instead(self, fault: PolicyFault, view: EngineView) -> SchedulePlan:
        """The plan of a step whose own one is at fault; raises the fault where the engine is to stop at it."""
        fault.policy = self.name
        if not self._goes_on:
            raise fault
        self.faults.add(fault)
        return plan_by_arrival(view, f"planned by arrival, for the policy failed: {fault}")

    def tell(self, event: str, about: Request | StepRecord, step: int) -> None:
        """Call one of its events; what it raises waits until the engine has done what it was about."""
        try:
            self._call(getattr(self.scheduler, event), about)
        except (Exception, SystemExit, Overdue) as error:
            request_id = about.id if isinstance(about, Request) else None
            fault = self._error(f"{event} {self._told(error)}", step, error, request_id)
            if self._goes_on:
                self.faults.add(fault)
            else:
                self._event_error = self._event_error or fault

    def tell_step(self, record: StepRecord, step: int) -> None:
        """`tell` of a step, with a copy: whatever is done with it, the records stay as they are."""
        if self._hears_steps:
            self.tell("on_step", record.copy(), step)

    def raise_event_error(self) -> None:
        """Raise what an event raised, the engine's books being consistent now."""
        error, self._event_error = self._event_error, None
        if error is not None:
            raise error

    def _call(self, method: Callable[[Subject], Answer], about: Subject) -> Answer:
        """A call of the policy, which its watch may end with Overdue."""
        self.calls += 1
        self.is_called = True
        try:
            return method(about)
        finally:
            self.is_called = False

    def _told(self, error: BaseException) -> str:
        """What a call did that ended with an error."""
        if isinstance(error, Overdue):
            self.is_called = False  # it may have struck in the midst of _call's end
            where = error.where(type(self.scheduler).__module__)
            return f"did not return within {self.patience:g} s; it was in {where}"
        place = where_in(error, type(self.scheduler).__module__)
        return f"raised {words_of(error)}" + (f" (in {place})" if place else "")

    def _error(
        self, rule: str, step: int, cause: BaseException | None = None, request_id: str | None = None
    ) -> PolicyError:
        """Errors of a PolicyScheduler's choices bring the request that the choice was about."""
        if request_id is None and cause is not None:
            noted = vars(cause).get("request_id")
            request_id = noted if isinstance(noted, str) else None
        error = PolicyError(f"{self.name}.{rule}", step=step, request_id=request_id, policy=self.name)
        error.__cause__ = cause
        return error


class ProgressGuard:
    """Ends a livelock: live requests, and none gets further than it ever was.

    A step that recomputes and preempts nobody isn't counted: it gets there in the end, however long the prompt. Nor is
    a wait of the policy's own that an arrival or an end cuts short.

    Args:
        limit: idle or preempting steps in a row without progress.

    Attributes:
        wake_at: clock seconds until which the policy waits, by its last plan; None when it doesn't, or something has
            happened since.
    """

    def __init__(self, limit: int) -> None:
        self.wake_at: float | None = None
        self._limit = limit
        self._steps = 0

    def after(self, batch: Batch, progress: bool, queues: RequestQueues, cache: KVCache, policy: str) -> None:
        """Raises StalledError: the limit is reached; names the request that waits longest."""
        self.wake_at = None if batch.rows or batch.preempted else batch.wake_at
        if progress or not queues.live:
            self._steps = 0
        elif batch.preempted or not batch.rows:
            self._steps += 1
        if self._steps >= self._limit:
            longest = min(queues.live.values(), key=lambda r: r.arrival_time)
            raise StalledError(
                f"no request advanced in {self._steps} steps (stall_limit); the longest waiting is {longest!r}, "
                f"arrived at {longest.arrival_time:.3f} s; {cache.num_free_blocks} of {cache.num_blocks} blocks are "
                f"free; the policy is {policy}"
            )

    def rest(self, clock: Clock) -> None:
        """Let the time pass for which the policy waits."""
        if self.wake_at is not None:
            clock.sleep_until(self.wake_at)

    def interrupt(self) -> None:
        """Something happened that a waiting policy should see: it is asked again at once."""
        if self.wake_at is not None:
            self.wake_at = None
            self._steps = max(0, self._steps - 1)
