"""One engine of a cluster: the unchanged Engine, whose steps begin and end as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from research_engine.engine.contract import Batch, Pending
from research_engine.engine.driver import Arrival, add_arrival
from research_engine.engine.engine import Engine
from research_engine.engine.token_output import TokenOutput
from research_engine.executors.simulated import SimulatedStep
from research_engine.simulation.clock import VirtualClock

from .events import STEP_BEGINS, STEP_ENDS, EventQueue


@dataclass
class ReplicaView:
    """What a router may know of a replica: what it has sent there, and what has come back.

    Attributes:
        index: its place in the list.
        num_requests: sent and not ended.
        num_tokens: of those, prompt tokens and the output tokens that came back so far.
    """

    index: int
    num_requests: int = 0
    num_tokens: int = 0


class Replica:
    """Runs an engine on the cluster's queue of events.

    A step is a pair of events: it begins (view, plan, commit, hand over), and ends when its result is there (update).
    Between the two the engine is left alone, and what arrives waits until the next step begins, as a real engine looks
    at its queue between steps. So a replica alone does to the last bit what `engine.driver.replay` does.

    Args:
        engine: on a VirtualClock of its own, with a SimulatedExecutor on the same one.
        index: its place in the cluster.
        events: the cluster's queue.
        on_end: is told the outputs that end a request.

    Attributes:
        view: what routers see.
        busy_seconds: summed time of its steps.
    """

    def __init__(
        self, engine: Engine, index: int, events: EventQueue, on_end: Callable[[Replica, TokenOutput], None]
    ) -> None:
        if not isinstance(engine.clock, VirtualClock):
            raise TypeError(f"replica {index} is on {engine.clock!r}; it must be on a VirtualClock of its own")
        self.engine, self.view, self.busy_seconds = engine, ReplicaView(index), 0.0
        self._clock, self._events, self._on_end = engine.clock, events, on_end
        self._inbox: deque[Arrival] = deque()
        self._stepping = False  # a step is under way, or about to begin
        self._before: Pending | None = None  # with overlap, the step that is under way beside the one handed over

    def deliver(self, arrival: Arrival) -> None:
        """Take a request in when the next step begins."""
        self._inbox.append(arrival)
        self.view.num_requests += 1
        self.view.num_tokens += len(arrival.prompt_token_ids)
        self.wake()

    def wake(self) -> None:
        """Begin a step at this moment, unless one is under way."""
        if not self._stepping:
            self._stepping = True
            self._events.at(self._events.now, STEP_BEGINS, self._begin)

    def _begin(self) -> None:
        engine = self.engine
        self._clock.reach(self._events.now)
        while self._inbox:
            arrival = self._inbox.popleft()
            if add_arrival(engine, arrival) is not None:
                self.view.num_requests -= 1
                self.view.num_tokens -= len(arrival.prompt_token_ids)
        if not engine.has_unfinished:
            self._stepping = False
            return
        view = engine.view()
        batch = engine.commit(engine.plan(view), view)
        pending = engine.execute(batch)
        waits_for: Pending | None = pending
        if engine.config.overlap:
            waits_for, self._before = self._before, pending if batch.rows else None
        due = max(self._clock.now(), waits_for.ready if isinstance(waits_for, SimulatedStep) else 0.0)
        self.busy_seconds += due - self._events.now
        self._events.at(due, STEP_ENDS, lambda: self._end(batch, pending))

    def _end(self, batch: Batch, pending: Pending) -> None:
        engine = self.engine
        outputs = engine.update(batch, pending)
        self.view.num_tokens += len(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self.view.num_requests -= 1
                self.view.num_tokens -= output.request.num_tokens
                self._on_end(self, output)
        if engine.has_unfinished and not engine.idle:
            self._events.at(self._clock.now(), STEP_BEGINS, self._begin)
        else:
            self._stepping = False  # nothing to do, or a policy that lets its requests wait: for the next arrival
            if self._inbox:
                self.wake()
