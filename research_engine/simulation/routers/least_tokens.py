"""The replica with the fewest tokens under way, prompts and outputs so far; the first of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research_engine.engine.driver import Arrival
    from research_engine.simulation.cluster.replica import ReplicaView


@dataclass(kw_only=True)
class LeastTokens:
    """Tokens stand for memory and for work; how long an output will be nobody knows."""

    def route(self, arrival: Arrival, replicas: Sequence[ReplicaView]) -> int:
        return min(replicas, key=lambda replica: (replica.num_tokens, replica.index)).index
