"""Recorded real runs in a form small enough to ship: three files that a simulation is held against without a device.

    recording.json     format, model, machine, engine (an EngineConfig), capacity, capacities, runs
    requests.parquet   run, request_id, arrival, first_scheduled, first_token, last_token, prompt_tokens, output_tokens,
                       priority, client, reason; times in ticks of 0.1 us after the run's start
    steps.parquet      run, started, committed, executed, finished, and what the step asked of the device
                       (simulation.cost_model.Work)
    profile.json       the profile that was made on the same machine, if there is one

A step's rows are kept as the features that cost models read, not one by one, so a run of ten thousand steps takes some
200 KB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, ReplayReport
from research_engine.engine.records import Records, RequestRecord, StepRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cost_model import Work, work_of_record
from research_engine.simulation.timeline import TimedStep

FORMAT = 2
_TICKS = 10_000_000  # of the files' times, a second
_PACKED = 19  # of 22: a fifth smaller than by default, still written in a second
_TIMES = ("started", "committed", "executed", "finished")
_EVENTS = ("arrival", "first_scheduled", "first_token", "last_token")
_COUNTS = ("tokens", "sequences", "draws", "decodes", "decode_kv", "decode_kv_max", "blocks_moved", "blocks_copied")


@dataclass(frozen=True)
class RecordedStep:
    """When a step began, was committed, had its result and ended, and what it asked of the device."""

    started: float
    committed: float
    executed: float
    finished: float
    work: Work

    @property
    def timed(self) -> TimedStep:
        return TimedStep(self.work, self.started, self.executed, self.finished)


@dataclass(frozen=True)
class RecordedRun:
    """One policy under one load; seconds after the run's start.

    Attributes:
        scheduler, parameters: the policy.
        load: the rate as a share of the capacity; rate: requests per second.
        requests: every request's record.
        steps: those with rows.
        disturbed: share of the cores that other processes took meanwhile; None where the system does not tell.
    """

    scheduler: str
    parameters: Mapping[str, Any]
    load: float
    rate: float
    requests: list[RequestRecord]
    steps: list[RecordedStep]
    disturbed: float | None = None

    @property
    def arrivals(self) -> list[Arrival]:
        """The same requests again, with prompts of their lengths that share no beginning, by time."""
        made, first = [], 0
        for record in sorted(self.requests, key=lambda record: record.arrival_time):
            prompt = range(first, first + record.prompt_tokens)
            first += record.prompt_tokens
            sampling = SamplingParams(max_tokens=record.output_tokens, ignore_eos=True, detokenize=False)
            made.append(
                Arrival(record.arrival_time, record.request_id, prompt, sampling, record.priority, record.client)
            )
        return made

    @property
    def end(self) -> float:
        return max(step.finished for step in self.steps)


@dataclass(frozen=True)
class Recording:
    """Real runs of one model on one machine.

    Attributes:
        model: its name.
        machine: as `calibration.machine.machine_facts` tells it.
        engine: of every run.
        capacity: requests per second, of which a run's load is a share.
        runs: by policy and load.
        capacities: policy -> requests per second that it served when all came at once, of which `capacity` is the
            least; empty in a recording of an earlier version, which measured the first policy's alone.
    """

    model: str
    machine: Mapping[str, str]
    engine: EngineConfig
    capacity: float
    runs: list[RecordedRun] = field(default_factory=list)
    capacities: Mapping[str, float] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write the three files, over what is there."""
        import pandas as pd

        directory.mkdir(parents=True, exist_ok=True)
        heads, requests, steps = [], [], []
        for index, run in enumerate(self.runs):
            heads.append({"scheduler": run.scheduler, "parameters": dict(run.parameters), "load": run.load,
                          "rate": run.rate, "disturbed": run.disturbed})  # fmt: skip
            requests += [{"run": index, **_request_row(record)} for record in run.requests]
            steps += [{"run": index, **_step_row(step)} for step in run.steps]
        head = {
            "format": FORMAT, "model": self.model, "machine": dict(self.machine), "engine": asdict(self.engine),
            "capacity": self.capacity, "capacities": dict(self.capacities), "runs": heads,
        }  # fmt: skip
        for name, rows, times in (("requests", requests, _EVENTS), ("steps", steps, _TIMES)):
            frame = pd.DataFrame(rows)
            for column in times:
                frame[column] = (frame[column].astype("Float64") * _TICKS).round().astype("Int64")
            encoding = dict.fromkeys(times, "DELTA_BINARY_PACKED")  # times rise, so their differences are small
            frame.to_parquet(directory / f"{name}.parquet", compression="zstd", compression_level=_PACKED, index=False,
                             use_dictionary=["run"], column_encoding=encoding)  # fmt: skip
        (directory / "recording.json").write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Recording:
        """What `save` wrote.

        Raises:
            ValueError: it is no recording, or of another format; names the directory and what is wrong.
        """
        import pandas as pd

        try:
            head = json.loads((directory / "recording.json").read_text(encoding="utf-8"))
            if head["format"] != FORMAT:
                raise ValueError(f"format {head['format']!r}, this version reads {FORMAT}")
            frames = {name: pd.read_parquet(directory / f"{name}.parquet") for name in ("requests", "steps")}
            engine = {**head["engine"], "eos_token_ids": tuple(head["engine"]["eos_token_ids"])}
            runs = []
            for index, own in enumerate(head["runs"]):
                rows = {
                    name: frame[frame["run"] == index].drop(columns="run").to_dict("records")
                    for name, frame in frames.items()
                }
                requests = [_request_of(row) for row in rows["requests"]]
                runs.append(RecordedRun(**own, requests=requests, steps=[_step_of(row) for row in rows["steps"]]))
            return cls(
                head["model"], head["machine"], EngineConfig(**engine), head["capacity"], runs,
                dict(head.get("capacities", {})),
            )  # fmt: skip
        except KeyError as error:
            raise ValueError(f"{directory}: the recording lacks {error.args[0]!r}") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{directory}: no recording: {error}") from error


def record_run(
    records: Records, report: ReplayReport, *, scheduler: str, load: float, rate: float, disturbed: float | None = None
) -> RecordedRun:
    """A replay's records as seconds after its start."""
    start = report.start
    requests = []
    for record in records.requests:
        times = {
            name: None if getattr(record, name) is None else getattr(record, name) - start
            for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time", "finish_time")
        }
        requests.append(RequestRecord(**{**asdict(record), **times}))
    steps = [_recorded(step, start) for step in records.steps if step.request_ids]
    return RecordedRun(scheduler, {}, load, rate, requests, steps, disturbed)


def _recorded(step: StepRecord, start: float) -> RecordedStep:
    return RecordedStep(**{name: getattr(step, name) - start for name in _TIMES}, work=work_of_record(step))


def _request_row(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id, "client": record.client, "priority": record.priority,
        "arrival": record.arrival_time, "first_scheduled": record.first_scheduled_time,
        "first_token": record.first_token_time, "last_token": record.last_token_time, "reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens,
        "preemptions": record.preemptions,
    }  # fmt: skip


def _request_of(row: Mapping[str, Any]) -> RequestRecord:
    def when(name: str) -> float | None:
        return None if row[name] is None or row[name] != row[name] else float(row[name]) / _TICKS

    return RequestRecord(
        request_id=row["request_id"], client=row["client"], priority=int(row["priority"]),
        arrival_time=float(row["arrival"]) / _TICKS, first_scheduled_time=when("first_scheduled"),
        first_token_time=when("first_token"), last_token_time=when("last_token"), finish_time=when("last_token"),
        finish_reason=row["reason"], prompt_tokens=int(row["prompt_tokens"]), output_tokens=int(row["output_tokens"]),
        max_tokens=int(row["output_tokens"]), cached_tokens=0, recomputed_tokens=0, preemptions=int(row["preemptions"]),
    )  # fmt: skip


def _step_row(step: RecordedStep) -> dict[str, Any]:
    work = step.work
    return {
        **{name: getattr(step, name) for name in _TIMES},
        **{name: getattr(work, name) for name in _COUNTS},
        "chunk_tokens": [tokens for tokens, _ in work.prefills],
        "chunk_before": [before for _, before in work.prefills],
    }


def _step_of(row: Mapping[str, Any]) -> RecordedStep:
    chunks = zip(row["chunk_tokens"], row["chunk_before"], strict=True)
    work = Work(**{name: int(row[name]) for name in _COUNTS}, prefills=tuple((int(t), int(k)) for t, k in chunks))
    return RecordedStep(**{name: float(row[name]) / _TICKS for name in _TIMES}, work=work)
