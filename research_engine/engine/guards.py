"""What stands between a policy and the engine: its calls with their errors named, and an end to livelock."""

from __future__ import annotations

from .contract import Batch, EngineView, Request, SchedulePlan, Scheduler
from .errors import PolicyError, StalledError
from .kv_cache import KVCache
from .queues import RequestQueues
from .records import StepRecord


class GuardedPolicy:
    """Calls a scheduler and turns what goes wrong in it into a PolicyError that names policy, step and hook."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._event_error: PolicyError | None = None

    @property
    def name(self) -> str:
        return type(self.scheduler).__name__

    def schedule(self, view: EngineView) -> SchedulePlan:
        """Raises PolicyError: it raised, or returned something else than a SchedulePlan."""
        try:
            plan = self.scheduler.schedule(view)
        except (Exception, SystemExit) as error:
            what = f"{self.name}.schedule raised {type(error).__name__}: {error}"
            raise PolicyError(f"step {view.step}: {what}") from error
        if not isinstance(plan, SchedulePlan):
            raise PolicyError(
                f"step {view.step}: {self.name}.schedule returned {plan!r}; it must return a SchedulePlan"
            )
        return plan

    def tell(self, event: str, about: Request | StepRecord, step: int) -> None:
        """Call one of its events; what it raises waits until the engine has done what it was about."""
        try:
            getattr(self.scheduler, event)(about)
        except (Exception, SystemExit) as error:
            where = f"step {step}: {self.name}.{event}"
            self._event_error = self._event_error or PolicyError(f"{where} raised {type(error).__name__}: {error}")
            self._event_error.__cause__ = self._event_error.__cause__ or error

    def raise_event_error(self) -> None:
        """Raise what an event raised, the engine's books being consistent now."""
        error, self._event_error = self._event_error, None
        if error is not None:
            raise error


class ProgressGuard:
    """Ends a livelock: live requests, and none gets further than it ever was.

    A step that recomputes and preempts nobody isn't counted: it gets there in the end, however long the prompt.

    Args:
        limit: idle or preempting steps in a row without progress.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._steps = 0

    def after(self, batch: Batch, progress: bool, queues: RequestQueues, cache: KVCache, policy: str) -> None:
        """Raises StalledError: the limit is reached; names the request that waits longest."""
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
