"""One queue of events for everything in a cluster; what happens at one moment happens in a fixed order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

STEP_ENDS, ARRIVES, STEP_BEGINS = 0, 1, 2
"""Order at one moment: an engine that ends a step takes in what has arrived by then before it begins the next."""


class EventQueue:
    """Calls actions in order of time, then of kind, then of entry.

    Attributes:
        now: seconds of the event in progress; -inf before the first.
    """

    def __init__(self) -> None:
        self.now = -math.inf
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._entered = 0

    def at(self, when: float, kind: int, action: Callable[[], None]) -> None:
        """Enter an action; a moment that is past counts as now."""
        heapq.heappush(self._heap, (max(when, self.now), kind, self._entered, action))
        self._entered += 1

    def run(self) -> None:
        """Until nothing is left."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
