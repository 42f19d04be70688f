"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open: steps, requests, counters."""

from __future__ import annotations

from typing import Any

from research_engine.engine.records import Records

from .latency import is_completed

_ENGINE, _REQUESTS = 1, 2


def chrome_trace(records: Records, *, name: str = "run") -> dict[str, Any]:
    """Trace events of a run, in the JSON object format of the Trace Event specification; times in microseconds.

    Process 1 has a track of steps, each split into schedule, execute and update, and counters of requests, batch
    tokens and KV blocks. Process 2 has a track for each request, in order of arrival: queued, prefill (first
    scheduled to first token), decode; preemptions are marks on it.

    Args:
        records: of a run.
        name: shown as the name of the engine's process.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", _ENGINE, 0, name),
        _name("process_name", _REQUESTS, 0, "requests"),
        _name("thread_name", _ENGINE, 0, "steps"),
    ]
    requests = sorted(records.requests, key=lambda record: (record.arrival_time, record.request_id))
    track = {record.request_id: index for index, record in enumerate(requests)}
    for step in records.steps:
        events.append(_span(f"step {step.step}", _ENGINE, 0, step.started, step.finished, {
            "requests": len(step.request_ids), "tokens": sum(step.num_tokens), "new tokens": sum(map(int, step.drew)),
        }))  # fmt: skip
        events.append(_span("schedule", _ENGINE, 0, step.started, step.committed))
        events.append(_span("execute", _ENGINE, 0, step.committed, step.executed))
        events.append(_span("update", _ENGINE, 0, step.executed, step.finished))
        events.append(_counter("requests", step.started, running=step.num_running, waiting=step.num_waiting))
        events.append(_counter("batch tokens", step.started, tokens=sum(step.num_tokens)))
        events.append(_counter("KV blocks", step.started, used=step.blocks_used, cached=step.blocks_cached))
        events += [
            {"name": f"preempted ({event.mode})", "ph": "i", "s": "t", "pid": _REQUESTS, "tid": track[event.request_id],
             "ts": _us(step.committed), "args": {"reason": event.reason, "tokens lost": event.tokens_lost}}
            for event in step.preemptions if event.request_id in track
        ]  # fmt: skip
    for record in requests:
        tid = track[record.request_id]
        events.append(_name("thread_name", _REQUESTS, tid, record.request_id))
        args = {
            "prompt tokens": record.prompt_tokens,
            "output tokens": record.output_tokens,
            "priority": record.priority,
            "client": record.client,
            "finish reason": record.finish_reason,
        }
        end = record.last_token_time if is_completed(record) else record.finish_time
        times = [record.arrival_time, record.first_scheduled_time, record.first_token_time, end]
        for index, label in enumerate(("queued", "prefill", "decode")):
            begin, end = times[index], times[index + 1] if times[index + 1] is not None else times[-1]
            if begin is not None and end is not None:
                events.append(_span(label, _REQUESTS, tid, begin, end, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _span(
    name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    event = {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": _us(begin), "dur": _us(end - begin)}
    return event if args is None else event | {"args": args}


def _counter(name: str, at: float, **values: float) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": _ENGINE, "ts": _us(at), "args": values}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
