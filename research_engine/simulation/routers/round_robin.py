"""Each replica in turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research_engine.engine.driver import Arrival
    from research_engine.simulation.cluster.replica import ReplicaView


@dataclass(kw_only=True)
class RoundRobin:
    """Fair in requests, not in tokens."""

    _turn: int = field(default=-1, init=False)

    def route(self, arrival: Arrival, replicas: Sequence[ReplicaView]) -> int:
        self._turn += 1
        return replicas[self._turn % len(replicas)].index
