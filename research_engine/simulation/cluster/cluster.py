"""Replicas behind a router, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from research_engine.engine.driver import Arrival
from research_engine.engine.engine import Engine
from research_engine.engine.records import RequestRecord
from research_engine.engine.token_output import TokenOutput
from research_engine.simulation.routers import Router

from .events import ARRIVES, EventQueue
from .replica import Replica


@dataclass(frozen=True)
class ClusterReport:
    """How a run went. Times are seconds on the cluster's clock.

    Attributes:
        requests: a record a request, in the order in which they ended; TTFT, TPOT and the rest are read from it.
        start, end: first arrival, and the end of the last step.
        busy: share of the time between the two in which each replica was in a step.
        routed: requests that each replica got.
        transfers: KV transfers, their bytes, and the mean seconds from the end of a prefill to the arrival of its KV.
    """

    requests: list[RequestRecord]
    start: float
    end: float
    busy: list[float]
    routed: list[int]
    transfers: dict[str, float] = field(default_factory=dict)


class Cluster:
    """Equal or different engines that share the requests of one stream.

    Args:
        engines: each on a VirtualClock and with a scheduler of its own.
        router: chooses the replica of every request as it arrives.

    Raises:
        ValueError: no engine, or two on one clock.
    """

    def __init__(self, engines: Sequence[Engine], router: Router) -> None:
        if not engines:
            raise ValueError("a cluster needs at least one engine")
        if len({id(engine.clock) for engine in engines}) < len(engines):
            raise ValueError("two engines share a clock; each needs one of its own")
        self.events = EventQueue()
        self.replicas = [Replica(engine, i, self.events, self._ended) for i, engine in enumerate(engines)]
        self.router = router
        self._routed = [0] * len(engines)

    def run(self, arrivals: Iterable[Arrival]) -> ClusterReport:
        """Serve arrivals until all have ended.

        Args:
            arrivals: by time; taken from the iterator one by one as time gets there, so a generator's are never all
                in memory.

        Raises:
            ValueError: an arrival comes before the one before it, or the router's answer is no replica.
            PlanError, PolicyError, StalledError: from an engine.
        """
        source = iter(arrivals)
        first = next(source, None)
        start = 0.0 if first is None else first.time
        if first is not None:
            self._expect(first, source)
        self.events.run()
        while any(replica.engine.has_unfinished for replica in self.replicas):
            for replica in self.replicas:  # idle with live requests and nothing to come: the engine's own guard decides
                if replica.engine.has_unfinished:
                    replica.wake()
            self.events.run()
        end = max(replica.engine.clock.now() for replica in self.replicas)
        span = max(end - start, math.ulp(1.0))
        busy = [replica.busy_seconds / span for replica in self.replicas]
        return ClusterReport(self._requests(), start, end, busy, list(self._routed), self._transfers())

    def _expect(self, arrival: Arrival, source: Iterator[Arrival]) -> None:
        """Enter an arrival, whose coming enters the next."""

        def arrive() -> None:
            self._arrived(arrival)
            later = next(source, None)
            if later is not None:
                if later.time < arrival.time:
                    rule = "arrivals must come by time"
                    raise ValueError(f"{later.request_id!r} arrives at {later.time} s, after {arrival.time} s: {rule}")
                self._expect(later, source)

        self.events.at(arrival.time, ARRIVES, arrive)

    def _arrived(self, arrival: Arrival) -> None:
        self._send(arrival, self.router, self.replicas)

    def _send(self, arrival: Arrival, router: Router, replicas: Sequence[Replica]) -> None:
        chosen = router.route(arrival, [replica.view for replica in replicas])
        for replica in replicas:
            if replica.view.index == chosen:
                self._routed[self.replicas.index(replica)] += 1
                replica.deliver(arrival)
                return
        rule = f"it must be one of {', '.join(str(replica.view.index) for replica in replicas)}"
        raise ValueError(f"{type(router).__name__} routed {arrival.request_id!r} to {chosen!r}; {rule}")

    def _ended(self, replica: Replica, output: TokenOutput) -> None:
        """A request ended; nothing follows from it here."""

    def _requests(self) -> list[RequestRecord]:
        records = [record for replica in self.replicas for record in replica.engine.records.requests]
        return sorted(records, key=lambda record: math.inf if record.finish_time is None else record.finish_time)

    def _transfers(self) -> dict[str, float]:
        return {}
