"""`research-engine bench serve`: load on an OpenAI-compatible server, with vLLM's flags, report and JSON keys.

What it adds: latency from the scheduled time, the rate of sending as planned and as it was, a sweep of rates that finds
the saturation point, a warning when the client is the bottleneck, and what the server says of itself in every result.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from research_engine.bench.arrivals import arrival_times
from research_engine.bench.backends import BACKENDS, request_body
from research_engine.bench.client_tokenizer import load_client_tokenizer
from research_engine.bench.connection import ConnectionPool
from research_engine.bench.datasets import Dataset, Sample, build_dataset
from research_engine.bench.event_loop import run_fast
from research_engine.bench.load import Load, LoadDriver
from research_engine.bench.prompts import TokenizerLike, stream
from research_engine.bench.result_file import check_place
from research_engine.bench.serve_options import ServeBenchOptions, TrafficOptions, pairs
from research_engine.bench.serve_report import header_of, report_lines, save_result
from research_engine.bench.serve_result import serve_result
from research_engine.bench.server_facts import NoModelList, ServerError, counters, differences, model_of, server_facts
from research_engine.bench.sweep import run_sweep

INTERRUPTED = 130


def main(options: Annotated[ServeBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Load on an OpenAI-compatible server: latency from the scheduled time, throughput, goodput, saturation point.

    Args:
        options: what to ask, how, when, and what to report.
    """
    report = options.report
    if report.save_result or report.append_result:
        check_place(Path(report.result_dir or ".") / (report.result_filename or "result.json"), "result file")
    _raise_file_limit()
    return run_fast(_main(options))


async def _main(options: ServeBenchOptions) -> int:
    client = await ServeClient.connect(options)
    try:
        if options.traffic.sweep_rates is not None:
            return await run_sweep(client, options)
        result = await client.measure(options.traffic)
        print("\n".join(report_lines(result, options)))
        saved = True
        if options.report.save_result or options.report.append_result:
            saved = save_result(result, options)
        if result["interrupted"]:
            return INTERRUPTED
        return 0 if result["completed"] and saved else 1
    finally:
        await client.close()


class ServeClient:
    """A server that is measured, with the prompts for it; `measure` as often as one likes.

    Attributes:
        model_id: name or path of the model. tokenizer_id: whose tokenizer counts here; None: the server alone counts.
        dataset: where prompts come from.
    """

    def __init__(
        self,
        options: ServeBenchOptions,
        pool: ConnectionPool,
        *,
        model_id: str,
        served_name: str,
        tokenizer_id: str | None,
        tokenizer: TokenizerLike | None,
        dataset: Dataset,
    ) -> None:
        self.options, self.model_id, self.tokenizer_id, self.dataset = options, model_id, tokenizer_id, dataset
        self._pool, self._served_name, self._tokenizer = pool, served_name, tokenizer
        self._endpoint = options.target.endpoint or BACKENDS[options.target.backend]
        self._runs = 0
        self._sent_prompts: set[int] = set()

    @classmethod
    async def connect(cls, options: ServeBenchOptions) -> ServeClient:
        """Ask the server for its model unless that is given, and make ready what prompts need.

        Raises:
            ValueError: no server, no tokenizer, or a dataset that cannot be read.
        """
        target = options.target
        key = os.environ.get("OPENAI_API_KEY")
        headers = ({"Authorization": f"Bearer {key}"} if key else {}) | dict(pairs(target.header))
        pool = ConnectionPool(target.url, headers, time.perf_counter, verify=not target.insecure)
        try:
            model = await _ready_model(pool, target.url, target.ready_check_timeout_sec, target.model)
            model_id = target.model or str(model["id"])
            # vLLM's server names the path behind a served name
            root = str(model.get("root") or model["id"]) if target.model in (None, model["id"]) else model_id
            tokenizer_id = None if target.skip_tokenizer_init else target.tokenizer or root
            try:
                tokenizer = None if tokenizer_id is None else load_client_tokenizer(tokenizer_id)
            except ValueError as error:
                served = model.get("id")
                if target.tokenizer is not None or served in (None, model_id):
                    raise
                raise ValueError(f"{error}. This server's model is {served!r}, the default of --model") from None
            as_text = target.backend == "openai-chat"
            chosen = replace(options.dataset, self_timed=options.takes_trace_times)
            dataset = build_dataset(chosen, options.traffic.seed, tokenizer, as_text=as_text)
        except BaseException:
            await pool.close()
            raise
        return cls(
            options,
            pool,
            model_id=model_id,
            served_name=target.served_model_name or model_id,
            tokenizer_id=tokenizer_id,
            tokenizer=tokenizer,
            dataset=dataset,
        )

    async def close(self) -> None:
        await self._pool.close()

    async def measure(self, traffic: TrafficOptions) -> dict[str, Any]:
        """Warm up, send a load, and give its result with what the server says of itself.

        Args:
            traffic: how many and when; the rest is the client's options.
        """
        options = self.options
        if traffic.num_warmups:
            warm = self.dataset.draw(traffic.num_warmups, -1)
            driver = await self._drive(self._load(warm, "warmup", None, traffic), "warm-up")
            if driver.result.is_interrupted:
                raise KeyboardInterrupt
        run, self._runs = self._runs, self._runs + 1
        samples = self.dataset.draw(traffic.num_prompts, run)
        arrivals = arrival_times(traffic, len(samples), stream(traffic.seed, "arrivals"))
        if self.dataset.is_timed:
            scale = options.dataset.trace_time_scale
            arrivals = [(sample.arrival or 0.0) * scale for sample in samples]
        load = self._load(samples, str(run), arrivals, traffic)
        repeated = self._count_repeated(samples)
        facts, before = await server_facts(self._pool), await counters(self._pool)
        driver = await self._drive(load, "requests")
        after = await counters(self._pool)
        result = serve_result(
            load,
            driver.result,
            slo=options.report.slo,
            names=options.report.metrics_of(options.target.is_streamed),
            percentiles=options.report.percentiles,
            count_tokens=self._count_tokens if self._tokenizer is not None else None,
        )
        if repeated:
            result["warnings"].append(
                f"{repeated} of {len(samples)} prompts were sent before: a prefix cache answers a part of them"
            )
        header = header_of(options, traffic, model_id=self.model_id, tokenizer_id=self.tokenizer_id)
        result["server"] = facts | {"counters": differences(before, after)}
        return header | {"dataset": self.dataset.origin} | result

    async def _drive(self, load: Load, what: str) -> LoadDriver:
        with _progress(what, len(load.samples), enabled=not self.options.report.disable_tqdm) as advance:
            driver = LoadDriver(self._pool, load, advance)
            with _on_interrupt(driver.stop):
                await driver.run()
        return driver

    def _load(
        self, samples: Sequence[Sample], run: str, arrivals: Sequence[float] | None, traffic: TrafficOptions
    ) -> Load:
        target = self.options.target
        return Load(
            samples,
            self._requests(samples, run),
            arrivals,
            target.is_streamed,
            traffic.max_concurrency,
            target.request_timeout_sec,
        )

    def _requests(self, samples: Sequence[Sample], run: str) -> list[bytes]:
        options, target = self.options, self.options.target
        extra = options.sampling.body(target.backend)
        return [
            self._pool.request(
                "POST",
                self._endpoint,
                request_body(
                    target.backend,
                    sample,
                    model=self._served_name,
                    streamed=target.is_streamed,
                    ignore_eos=options.ignores_eos,
                    extra=extra,
                ),
                {"x-request-id": f"{target.request_id_prefix}{run}-{index}"},
            )
            for index, sample in enumerate(samples)
        ]

    def _count_repeated(self, samples: Sequence[Sample]) -> int:
        repeated = 0
        for sample in samples:
            key = hash(sample.prompt if isinstance(sample.prompt, str) else tuple(sample.prompt))
            repeated += key in self._sent_prompts
            self._sent_prompts.add(key)
        return repeated

    def _count_tokens(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer.encode(text, add_special_tokens=False))


async def _ready_model(pool: ConnectionPool, url: str, patience: float, given: str | None) -> Mapping[str, Any]:
    """The server's model, asked for again and again until `patience` seconds have passed; `given` if it lists none."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return await model_of(pool, url)
        except ServerError as error:
            if given is not None and isinstance(error, NoModelList):
                return {"id": given}
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(0.2)


@contextmanager
def _progress(what: str, total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[under_way]} under way"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not enabled, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total, under_way=0)

        def advance(ended: int, under_way: int) -> None:
            bar.update(task, completed=ended, under_way=under_way, refresh=True)

        yield advance


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` once; pressed again it acts as ever."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, once)
    except (NotImplementedError, ValueError, RuntimeError):  # no signals here: another system, or another thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _raise_file_limit() -> None:
    """A connection is a file, and 1,024 of them, the usual limit, are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_535 if hard == resource.RLIM_INFINITY else min(hard, 65_535)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
