"""Deficit round robin: clients take turns, and each turn is worth the same amount of service.

Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round-Robin", SIGCOMM 1995. As the length of an answer is
unknown, a client may go into debt by the tokens its requests draw, and pays it off before its next turn.
"""

from __future__ import annotations

import math
from collections import deque
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
class DeficitRoundRobin(PolicyScheduler):
    """Running requests as admitted, then waiting ones of the client whose turn it is while its deficit is above 0.

    Every visit adds `quantum` to a client's deficit; a prompt is charged whole when its request is admitted, an output
    token when it is drawn, recompute never. A client with nothing waiting loses what it has left, yet keeps its debt.
    Waiting bound: a client with requests waiting has its turn once every other had one and its own debt, at most what
    a cache full of its requests drew, is paid off a quantum a round.

    Args:
        quantum: weighted tokens per turn.
        weight_input: what a prompt token counts.
        weight_output: what an output token counts.
    """

    quantum: float = 512.0
    weight_input: float = 1.0
    weight_output: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("quantum", self.quantum > 0, "weighted tokens > 0")
        for name in ("weight_input", "weight_output"):
            self._check(name, getattr(self, name) >= 0, ">= 0")
        self.deficits: dict[str, float] = {}
        self.ring: deque[str] = deque()  # clients with waiting requests; it is the first one's turn
        self.queue = KeptQueue(lambda r: (r.arrival_time, r.index), shelf=lambda r: r.client)
        self._service = ClientService(self.weight_input, self.weight_output)
        self._draft: tuple[set[str], deque[str], dict[str, float]] = (set(), deque(), {})

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        if view.num_running >= view.max_num_seqs:
            return
        ring, deficits, at = self.ring.copy(), dict(self.deficits), dict.fromkeys(self.ring, 0)
        visited, offered = dict(deficits), set[str]()
        self._draft = (offered, ring, visited)  # becomes the state if somebody was admitted, for else no turn ended
        while ring and not self.admission_closed:
            client = self._visit(ring, deficits, visited)
            shelf = self.queue.waiting(client)
            if at[client] == len(shelf):
                ring.popleft()
                continue
            _, request = shelf[at[client]]
            at[client] += 1
            offered.add(request.id)
            yield request
            if request.id in self.planned:
                deficits[client] -= self._service.price(request)

    def _visit(self, ring: deque[str], deficits: dict[str, float], visited: dict[str, float]) -> str:
        """Whose turn it is; ends the turns of those in debt. Rounds in which all stay in debt are counted at once."""
        rounds = math.floor(max(0.0, -max(deficits[client] for client in ring)) / self.quantum)
        for client in ring if rounds else ():
            deficits[client] += rounds * self.quantum
            visited[client] += rounds * self.quantum
        while deficits[ring[0]] <= 0:
            ring.rotate(-1)
            deficits[ring[0]] += self.quantum
            visited[ring[0]] += self.quantum
        return ring[0]

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"client": request.client, "deficit": self.deficits[request.client]}

    def on_arrival(self, request: Request) -> None:
        self.queue.arrive(request)
        self._service.arrive(request)
        self._follow()

    def on_step(self, record: StepRecord) -> None:
        offered, ring, visited = self._draft
        if not offered.isdisjoint(record.request_ids):
            self.ring, self._draft = ring, (set(), deque(), {})
            self.deficits.update(visited)
        for client, service in self._service.settle(record).items():
            self.deficits[client] -= service
        self.queue.settle(record)
        self._follow()

    def on_finish(self, request: Request) -> None:
        self.queue.finish(request)
        self._service.finish(request)

    def _follow(self) -> None:
        """Take clients with nothing waiting out of the ring, put new ones at its end."""
        shelves = self.queue.shelves
        self.ring = deque(client for client in self.ring if client in shelves)
        self.deficits |= {client: 0.0 for client, left in self.deficits.items() if left > 0 and client not in shelves}
        present = set(self.ring)
        for client in (client for client in shelves if client not in present):
            deficit = self.deficits.get(client, 0.0)
            first = deficit <= 0 and not self.ring  # an empty ring's first client has its turn at once
            self.deficits[client] = deficit + self.quantum if first else deficit
            self.ring.append(client)
