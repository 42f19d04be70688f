"""One trial: a fresh engine serves a workload, and what it left behind is written as one directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.backend import Backend
from experiments.config import ConfigError, TrialSettings
from experiments.environment import trial_environment
from experiments.plan import Trial
from experiments.storage import new_directory, write_json, write_with
from experiments.workloads import Workload, build_workload
from research_engine import metrics
from research_engine.engine.config import EngineConfig
from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.driver import Arrival, ReplayReport, replay
from research_engine.engine.records import Records
from research_engine.metrics.frames import parquet_schema
from research_engine.other_load import DISTURBED_ABOVE, CoreWatch

WARMUP_TOKENS = 8  # of output, for each request of the warm-up
Progress = Callable[[int], None]


def run_trial(
    trial: Trial, workload: Workload, backend: Backend, directory: Path, on_finished: Progress, begin: float
) -> dict[str, Any]:
    """Serve the workload and write `directory`: summary.json, requests.parquet, steps.parquet, trace.json,
    timing.json and environment.json (what the trial took, and under what it ran, which alone differ when a simulation
    runs again), and decisions.jsonl when settings.explain asks for it.

    Args:
        trial: settings and seed; the backend is prepared for them.
        workload: what to serve.
        directory: appears when everything in it is complete.
        on_finished: is told how many requests ended in a step.
        begin: `time.monotonic()` when the trial's preparations began, for timing.json.

    Returns:
        The summary.
    """
    settings, ran_under = serving(trial), trial_environment()
    engine = backend.engine(settings, trial.seed)
    if settings.explain:
        engine.decisions = DecisionLog(type(engine.scheduler).__name__)
    watch = CoreWatch() if backend.kind == "real" else None
    try:
        report = replay(
            engine,
            workload.arrivals,
            on_outputs=lambda outputs: on_finished(sum(output.finish_reason is not None for output in outputs)),
            follow_up=None if workload.follow_ups is None else workload.follow_ups.begin(),
        )
        others = watch.others() if watch is not None else None
        summary = _summary(trial, workload, backend, engine.config, engine.records, report)
        summary["policy_faults"] = {"total": engine.faults.total, "latest": list(map(str, engine.faults.latest))}
        summary |= {"other_load": others, "disturbed": others is not None and others > DISTURBED_ABOVE}
        with new_directory(directory) as fresh:
            if engine.decisions is not None:
                engine.decisions.write(fresh / "decisions.jsonl")
            _write(fresh, trial, engine.records, summary)
            write_json(fresh / "environment.json", ran_under)
            write_json(fresh / "timing.json", {"wall_seconds": time.monotonic() - begin})
    finally:
        engine.executor.shutdown()
    return summary


def warm_up(settings: TrialSettings, workload: Workload, backend: Backend) -> None:
    """Serve as many of the workload's requests as the run serves at once, on an engine that is thrown away.

    They come all at once, with whole prompts and a few output tokens, so that batches are as large as they get. A
    simulation computes nothing and keeps nothing, and is not warmed up.
    """
    wanted = settings.max_num_seqs if settings.warmup_requests is None else settings.warmup_requests
    first = workload.arrivals[:wanted]
    if not first or backend.kind != "real":
        return
    engine = backend.engine(settings, 0)
    arrivals = []
    for arrival in first:
        few = min(arrival.sampling.max_tokens or WARMUP_TOKENS, WARMUP_TOKENS)
        sampling = replace(arrival.sampling, max_tokens=few)
        arrivals.append(Arrival(0.0, arrival.request_id, arrival.prompt_token_ids, sampling))
    try:
        replay(engine, arrivals)
    finally:
        engine.executor.shutdown()


def make_workload(trial: Trial, backend: Backend) -> Workload:
    """The trial's workload, checked against what its engine can hold.

    Raises:
        ConfigError: a request is longer than the settings allow, says which limit to raise; or no engine can be made.
        WorkloadError: see `build_workload`.
    """
    settings = serving(trial)
    workload = build_workload(
        settings.workload, trial.seed, vocab_size=backend.vocab_size(), tokenizer=backend.tokenizer()
    )
    config = backend.config(settings)
    longest = workload.statistics["longest_total"]
    limits = {"max_model_len": config.max_model_len, "num_blocks x block_size": config.num_slots}
    for name, limit in limits.items():
        if longest > limit:
            raise ConfigError(
                f"{trial.name}: the longest request has {longest} tokens, {name} is {limit}; "
                "raise it, or bound workload.lengths.max_total"
            )
    return workload


def serving(trial: Trial) -> TrialSettings:
    """The settings of a trial that serves requests."""
    assert isinstance(trial.settings, TrialSettings)
    return trial.settings


def _summary(
    trial: Trial, workload: Workload, backend: Backend, config: EngineConfig, records: Records, report: ReplayReport
) -> dict[str, Any]:
    settings = serving(trial)
    slo = settings.slo
    measured = metrics.summarize(
        records,
        block_size=config.block_size,
        start=report.start,
        end=report.end,
        slo=None if slo is None else metrics.SLO(**slo.model_dump()),
        bytes_per_block=backend.bytes_per_block(settings),
    )
    arrived = sorted((record.arrival_time, record.request_id) for record in records.requests)
    rates = metrics.arrival_rates(
        [time for time, _ in arrived],
        [report.entered.get(request_id) for _, request_id in arrived],
        [(step.started, step.finished) for step in records.steps],
    )
    return {
        "cell": trial.cell,
        "levels": dict(trial.levels),
        "seed": trial.seed,
        "repeat": trial.repeat,
        "key": trial.key,
        "kind": backend.kind,
        "machine": backend.machine(),
        "workload": {"origin": workload.origin, "warnings": list(workload.warnings), **workload.statistics},
        "offered_rate": rates.offered,
        "achieved_rate": rates.achieved,
        "void": rates.is_void,
        "unstable": not settings.workload.arrivals.is_closed and metrics.queue_grows(records),
        "worst_lag": report.worst_lag,
        "refused": report.refused,
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "clock_start": report.start,
        "metrics": measured,
        "slo": None if slo is None else slo.model_dump(),
        "batch_means": {
            name: asdict(means) for name, means in metrics.batch_means_of(records, report.start, report.end).items()
        },
    }


def _write(directory: Path, trial: Trial, records: Records, summary: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, frame in (("requests", metrics.requests_frame(records)), ("steps", metrics.steps_frame(records))):
        table = pa.Table.from_pandas(frame, schema=parquet_schema(name), preserve_index=False)
        write_with(directory / f"{name}.parquet", partial(pq.write_table, table))
    trace = json.dumps(metrics.chrome_trace(records, name=trial.name))
    (directory / "trace.json").write_text(trace, encoding="utf-8")
    write_json(directory / "summary.json", summary)
