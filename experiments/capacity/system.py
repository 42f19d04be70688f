"""A simulated system (replicas behind a router, or prefill apart from decode) under one stream of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from experiments.config import ConfigError, TrialSettings
from experiments.simulated_backend import SimulatedBackend
from experiments.workloads import build_workload
from research_engine import metrics
from research_engine.engine.driver import Arrival
from research_engine.engine.engine import Engine
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
class Load:
    """What came out under one rate and seed.

    Attributes:
        rate: requests per second offered.
        attainment: share of all requests that met every limit.
        trend: whether the queue grows, and by how many requests per second.
        latencies: of completed requests, as `metrics.latency_summary` gives them.
        output_throughput: tokens per second of completed requests.
        busy: mean share of the time in which engines were in a step.
    """

    rate: float
    attainment: float
    trend: metrics.QueueTrend
    latencies: dict[str, dict[str, float]]
    output_throughput: float
    busy: float

    def meets(self, attainment: float) -> bool:
        """Enough requests met the limits, and the queue stands."""
        return self.attainment >= attainment and not self.trend.grows


@dataclass
class System:
    """Serves streams of requests, each run from the start.

    Args:
        settings: of every engine; its workload's arrivals are not looked at, since `load` brings the rate.
        slo: the limits.
        layout: how many engines.

    Raises:
        ConfigError, LoadError: model, sheet or profile cannot be had.
    """

    settings: TrialSettings
    slo: metrics.SLO
    layout: Layout = field(default_factory=Layout)

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
        as a request is served for: a shorter run ends before the system is full.
        """
        count = self.settings.workload.num_requests * copies
        for _ in range(MOST_LENGTHENED):
            arrivals = [replace(arrival, time=arrival.time / rate) for arrival in self._stream(seed, count)]
            report = self._cluster(self.layout.times(copies)).run(arrivals)
            if arrivals[-1].time - arrivals[0].time >= FULL_AFTER * metrics.service_seconds(report.requests):
                break
            count *= 2
        return _load_of(report, rate, self.slo)

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

    def _engines(self, count: int) -> list[Engine]:
        engines = [self._backend.engine(self.settings, 0) for _ in range(count)]
        for engine in engines:
            engine.records = StreamedRecords()
        return engines

    def _cluster(self, layout: Layout) -> Cluster:
        engines = self._engines(layout.num_engines)
        router = create_router(layout.router)
        if not layout.prefill:
            return Cluster(engines, router)
        assert layout.link_bandwidth is not None
        bytes_per_token = self._backend.bytes_per_block(self.settings) / self.settings.block_size
        link = KVLink(bytes_per_token, layout.link_bandwidth, layout.link_latency)
        first, rest = engines[: layout.prefill], engines[layout.prefill :]
        return Disaggregated(first, rest, router, create_router(layout.router), link)


def _load_of(report: ClusterReport, rate: float, slo: metrics.SLO) -> Load:
    requests = report.requests
    done = [record for record in requests if metrics.is_completed(record)]
    span = report.end - report.start
    return Load(
        rate=rate,
        attainment=sum(map(slo.is_met, requests)) / len(requests),
        trend=metrics.queue_trend(requests),
        latencies={
            name: metrics.percentiles(map(metric, done))
            for name, metric in (("ttft", metrics.ttft), ("tpot", metrics.tpot), ("e2e", metrics.e2e))
        },
        output_throughput=sum(record.output_tokens for record in done) / span if span > 0 else 0.0,
        busy=sum(report.busy) / len(report.busy),
    )
