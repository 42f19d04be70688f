"""Virtual token counter: of all clients with waiting requests, the one served least goes next.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2. A counter per client adds up weighted
input and output tokens; a client that comes back from idleness is lifted, so that it brings no credit for the time in
which it asked for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler
from .client_service import ClientService
from .kept_queue import KeptQueue

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


@dataclass(kw_only=True)
class VTC(PolicyScheduler):
    """Running requests as admitted, then waiting ones: the first of the client with the smallest counter, and so on.

    A prompt is charged whole when its request is admitted, an output token when it is drawn, recompute never. Bound: of
    two clients that both have requests waiting all the time, neither gets ahead of the other by more than
    2 x max(weight_input x longest prompt, weight_output x token slots of the cache), whatever they send (theorem 4.4);
    with `overtaking` on that does not hold.

    Args:
        weight_input: what a prompt token counts.
        weight_output: what an output token counts.
    """

    weight_input: float = 1.0
    weight_output: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weight_input", "weight_output"):
            self._check(name, getattr(self, name) >= 0, ">= 0")
        self.counters: dict[str, float] = {}
        self.queue = KeptQueue(lambda r: (r.arrival_time, r.index), shelf=lambda r: r.client)
        self._service = ClientService(self.weight_input, self.weight_output)
        self._last_to_leave: str | None = None  # client whose request left the queue empty

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        if view.num_running >= view.max_num_seqs:
            return
        shelves = self.queue.shelves
        heap = [(self.counters[client], client, 0) for client in shelves]
        heapq.heapify(heap)
        while heap and not self.admission_closed:
            counter, client, at = heap[0]
            _, request = shelves[client][at]
            yield request
            if request.id in self.planned:
                counter += self._service.price(request)
            if at + 1 < len(shelves[client]):
                heapq.heapreplace(heap, (counter, client, at + 1))
            else:
                heapq.heappop(heap)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"client": request.client, "counter": self.counters[request.client]}

    def on_arrival(self, request: Request) -> None:
        waiting, counters, client = self.queue.shelves, self.counters, request.client
        if client not in waiting:
            if waiting:
                least = min(counters[other] for other in waiting)
            else:
                least = counters.get(self._last_to_leave, 0.0) if self._last_to_leave is not None else 0.0
            counters[client] = max(counters.get(client, 0.0), least)
        self.queue.arrive(request)
        self._service.arrive(request)

    def on_step(self, record: StepRecord) -> None:
        before = set(self.queue.shelves)
        for client, service in self._service.settle(record).items():
            self.counters[client] += service
        self.queue.settle(record)
        self._note_who_left(before)

    def on_finish(self, request: Request) -> None:
        before = set(self.queue.shelves)
        self.queue.finish(request)
        self._service.finish(request)
        self._note_who_left(before)

    def _note_who_left(self, before: set[str]) -> None:
        """If the queue is empty now and was not before: whose counter a newcomer is lifted to."""
        if before and not self.queue.shelves:
            self._last_to_leave = max(before, key=lambda client: (self.counters[client], client))
