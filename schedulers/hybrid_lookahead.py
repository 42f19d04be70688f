"""First come, first served, with a bounded look past a request that does not fit.

Backfilling, as batch systems have it (Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995), for KV blocks: small
requests use the blocks that the first in the queue cannot use yet. The bound on passing replaces Lifka's reservation,
which needs run times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


@dataclass(kw_only=True)
class HybridLookahead(PolicyScheduler):
    """Decodes, prompts under way, then waiting ones by arrival, past those that do not fit.

    Waiting bound: at most `max_passes` requests that stand behind a request are admitted before it (a preempted one
    that comes back stands before all that are new).

    Args:
        lookahead: requests that may fail to fit in one step before the queue is left.
        max_passes: admissions past a request before it is waited for.
    """

    overtaking: bool = True
    lookahead: int = 8
    max_passes: int = 16
    passes: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    behind: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lookahead", "max_passes"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int) and value >= 0, "an integer >= 0")

    def order(self, view: EngineView) -> Iterable[Request]:
        prompts = []
        for request in view.running:
            if request.is_decoding:
                yield request
            else:
                prompts.append(request)
        yield from prompts
        self.behind.clear()  # who was tried -> those before it that did not fit
        failed: tuple[str, ...] = ()
        passed = 0
        for request in self.newcomers(view):
            self.behind[request.id] = failed
            yield request
            if request.id not in self.planned:
                failed = (*failed, request.id)
                passed = max(passed, self.passes[request.id])
            elif failed:
                passed += 1  # no less than what on_step will count for each of them
            if len(failed) > self.lookahead or (failed and passed >= self.max_passes):
                self.rest = f"waits behind {failed[0]}, which may not be passed by more"
                return

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"arrived": request.arrival_time, "passed by": self.passes[request.id]}

    def on_arrival(self, request: Request) -> None:
        self.passes.pop(request.id, None)  # of an earlier request of that id

    def on_step(self, record: StepRecord) -> None:
        for name in self.behind.keys() & set(record.request_ids):
            self.passes.update(self.behind.pop(name))

    def on_finish(self, request: Request) -> None:
        self.passes.pop(request.id, None)
