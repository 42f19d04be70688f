"""What a router is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from research_engine.engine.driver import Arrival
    from research_engine.simulation.cluster.replica import ReplicaView


@runtime_checkable
class Router(Protocol):
    """Chooses once, as a request arrives, and from what a load balancer sees: its own traffic. May keep state."""

    def route(self, arrival: Arrival, replicas: Sequence[ReplicaView]) -> int:
        """The `index` of the replica that is to serve the request. Must not change the views."""
        ...
