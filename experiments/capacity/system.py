"""A simulated system (replicas behind a router, or prefill apart from decode) under one stream of requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from experiments.config import ConfigError, TrialSettings
from experiments.simulated_backend import SimulatedBackend
from experiments.workloads import build_workload
from research_engine import metrics
from research_engine.engine.driver import Arrival
from research_engine.engine.engine import Engine
from research_engine.engine.records import StepRecord
from research_engine.simulation.cluster.cluster import Cluster, ClusterReport
from research_engine.simulation.cluster.disaggregated import Disaggregated, KVLink
from research_engine.simulation.routers import create_router
from research_engine.simulation.streamed_records import StreamedRecords

FULL_AFTER = 8
MOST_LENGTHENED = 6


@dataclass(frozen=True)
class Layout:
    """How many engines there are, and what is between them.

    Args:
        replicas: engines that serve whole requests, or, with `prefill`, that decode.
        prefill: engines that prefill alone; 0 for none.
        router: of each kind of engine.
        link_bandwidth: bytes a second of KV out of one prefill engine; link_latency: seconds on top.

    Raises:
        ValueError: a number is out of range, or prefill engines without a link.
    """

    replicas: int = 1
    prefill: int = 0
    router: str = "least_tokens"
    link_bandwidth: float | None = None
    link_latency: float = 0.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.prefill < 0:
            raise ValueError(f"replicas = {self.replicas}, prefill = {self.prefill}: must be >= 1 and >= 0")
        if self.prefill and self.link_bandwidth is None:
            raise ValueError(f"prefill = {self.prefill}: KV has to be sent; give link_bandwidth")

    def times(self, count: int) -> Layout:
        """`count` of these beside each other, behind one router."""
        return replace(self, replicas=count * self.replicas, prefill=count * self.prefill)

    @property
    def num_engines(self) -> int:
        return self.replicas + self.prefill


@dataclass(frozen=True)
class RunLimits:
    """Limits in seconds on a run as a whole, where an SLO limits each request; None asks for nothing.

    Args:
        itl_p99: on the 99th percentile of all gaps between tokens (TBT in Sarathi-Serve).
        queueing_p50: on the median queueing delay.

    Raises:
        ValueError: a limit is no positive number.
    """

    itl_p99: float | None = None
    queueing_p50: float | None = None

    def __post_init__(self) -> None:
        for name in ("itl_p99", "queueing_p50"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}: must be seconds > 0")

    def are_met(self, itl_p99: float, queueing_p50: float) -> bool:
        """NaN, of a run without such values, exceeds nothing."""
        of = ((itl_p99, self.itl_p99), (queueing_p50, self.queueing_p50))
        return not any(limit is not None and value > limit for value, limit in of)


@dataclass(frozen=True)
class Load:
    """What came out under one rate and seed.

    Attributes:
        rate: requests per second sent.
        attainment: share of all requests that met every limit.
        trend: whether the queue grows, and by how many requests per second.
        latencies: of completed requests, as `metrics.latency_summary` gives them; of gaps between tokens only where
            they are limited.
        output_throughput: tokens per second of completed requests.
        busy: mean share of the time in which engines were in a step.
    """

    rate: float
    attainment: float
    trend: metrics.QueueTrend
    latencies: dict[str, dict[str, float]]
    output_throughput: float
    busy: float
    limits: RunLimits = RunLimits()

    def meets(self, attainment: float) -> bool:
        """Enough requests met the limits, the run as a whole met its own, and the queue stands."""
        return self.attainment >= attainment and self.keeps_run_limits and not self.trend.grows

    def under(self, limits: RunLimits) -> Load:
        """The same run, judged by other limits on it as a whole."""
        return replace(self, limits=limits)

    @property
    def keeps_run_limits(self) -> bool:
        """Whether the run as a whole kept its limits."""
        return self.limits.are_met(self._point("itl", "p99"), self._point("queueing_delay", "p50"))

    def _point(self, latency: str, point: str) -> float:
        return self.latencies.get(latency, {}).get(point, math.nan)


class Gaps:
    """Folds steps into the gaps between each request's tokens, over all engines that serve it. Mutated by `add`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._latest: dict[str, float] = {}

    def add(self, step: StepRecord) -> None:
        latest, now = self._latest, step.executed
        for request_id, drew in zip(step.request_ids, step.drew, strict=True):
            if drew:
                before = latest.get(request_id)
                if before is not None:
                    self.seconds.append(now - before)
                latest[request_id] = now


@dataclass
class System:
    """Serves streams of requests, each run from the start.

    Args:
        settings: of every engine; its workload's arrivals are not looked at, since `load` brings the rate.
        slo: the limits on each request.
        layout: how many engines.
        limits: on a run as a whole.

    Raises:
        ConfigError, LoadError: model, sheet or profile cannot be had.
    """

    settings: TrialSettings
    slo: metrics.SLO
    layout: Layout = field(default_factory=Layout)
    limits: RunLimits = field(default_factory=RunLimits)

    def __post_init__(self) -> None:
        self._backend = SimulatedBackend(progress=False)
        self._backend.prepare(self.settings)
        self._streams: dict[tuple[int, int], list[Arrival]] = {}

    @property
    def machine(self) -> str:
        return self._backend.machine()

    def load(self, rate: float, seed: int, *, copies: int = 1) -> Load:
        """One run at `rate` requests per second, of `copies` times the layout.

        Every copy gets the workload's number of requests, and twice as many until the arrivals last eight times as long
        as a request is served for: a shorter run ends before the system is full. One that breaks a limit on runs while
        the system still fills is not made longer.
        """
        count = self.settings.workload.num_requests * copies
        for _ in range(MOST_LENGTHENED):
            arrivals = [replace(arrival, time=arrival.time / rate) for arrival in self._stream(seed, count)]
            gaps = Gaps() if self.limits.itl_p99 is not None else None
            report = self._cluster(self.layout.times(copies), gaps).run(arrivals)
            load = _load_of(report, rate, self.slo, gaps, self.limits)
            is_full = arrivals[-1].time - arrivals[0].time >= FULL_AFTER * metrics.service_seconds(report.requests)
            if is_full or not load.keeps_run_limits:
                break
            count *= 2
        return load

    def most(self, seed: int) -> float:
        """Requests per second that one layout serves when all come at once: no rate above it can last."""
        arrivals = [replace(arrival, time=0.0) for arrival in self._stream(seed, self.settings.workload.num_requests)]
        report = self._cluster(self.layout).run(arrivals)
        served = sum(metrics.is_completed(record) for record in report.requests)
        if not served:
            raise ConfigError(
                f"none of {len(arrivals)} requests could be served: the first takes more KV blocks than there are"
            )
        return served / (report.end - report.start)

    def _stream(self, seed: int, count: int) -> list[Arrival]:
        """Poisson at one request per second; another rate stretches it."""
        if (seed, count) not in self._streams:
            own = self.settings.workload
            poisson = type(own.arrivals)(process="poisson", rate=1.0)
            workload = build_workload(
                own.model_copy(update={"arrivals": poisson, "num_requests": count}),
                seed,
                vocab_size=self._backend.vocab_size(),
                tokenizer=self._backend.tokenizer(),
            )
            self._streams[seed, count] = sorted(workload.arrivals, key=lambda arrival: arrival.time)
        return self._streams[seed, count]

    def _engines(self, count: int, on_step: Callable[[StepRecord], None] | None) -> list[Engine]:
        engines = [self._backend.engine(self.settings, 0) for _ in range(count)]
        for engine in engines:
            engine.records = StreamedRecords(on_step=on_step)
        return engines

    def _cluster(self, layout: Layout, gaps: Gaps | None = None) -> Cluster:
        engines = self._engines(layout.num_engines, None if gaps is None else gaps.add)
        router = create_router(layout.router)
        if not layout.prefill:
            return Cluster(engines, router)
        assert layout.link_bandwidth is not None
        bytes_per_token = self._backend.bytes_per_block(self.settings) / self.settings.block_size
        link = KVLink(bytes_per_token, layout.link_bandwidth, layout.link_latency)
        first, rest = engines[: layout.prefill], engines[layout.prefill :]
        return Disaggregated(first, rest, router, create_router(layout.router), link)


def _load_of(report: ClusterReport, rate: float, slo: metrics.SLO, gaps: Gaps | None, limits: RunLimits) -> Load:
    requests = report.requests
    done = [record for record in requests if metrics.is_completed(record)]
    span = report.end - report.start
    of_requests = (
        ("ttft", metrics.ttft), ("tpot", metrics.tpot), ("e2e", metrics.e2e), ("queueing_delay", metrics.queueing_delay)
    )  # fmt: skip
    latencies = {name: metrics.percentiles(map(metric, done)) for name, metric in of_requests}
    if gaps is not None:
        latencies["itl"] = metrics.percentiles(gaps.seconds)
    return Load(
        rate=rate,
        attainment=sum(map(slo.is_met, requests)) / len(requests),
        trend=metrics.queue_trend(requests),
        latencies=latencies,
        output_throughput=sum(record.output_tokens for record in done) / span if span > 0 else 0.0,
        busy=sum(report.busy) / len(report.busy),
        limits=limits,
    )
