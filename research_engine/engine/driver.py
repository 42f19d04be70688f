"""Replay: every request is added at its scheduled arrival, however far behind the engine is."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .engine import Engine
from .errors import RequestError
from .overdue import overdue_calls_end
from .records import RequestRecord
from .request import Request
from .sampling_params import SamplingParams
from .token_output import TokenOutput


@dataclass(frozen=True)
class Arrival:
    """One request of a workload.

    Attributes:
        time: seconds after the replay's start at which it arrives.
        request_id, prompt_token_ids, sampling, priority, client, deadline, predicted_tokens, computed_tokens: as
            `Engine.add_request` takes them; deadline counts from the replay's start, too.
    """

    time: float
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    client: str = ""
    deadline: float | None = None
    predicted_tokens: int | None = None
    computed_tokens: int = 0


@dataclass(frozen=True)
class ReplayReport:
    """How a replay went. Times are seconds on the engine's clock.

    Attributes:
        start, end: first possible arrival, and the end of the last step.
        worst_lag: how late the latest request was added after its arrival; a step in progress delays adding.
        refused: request id -> why.
        entered: request id -> when it was added; refused ones are not in it.
        due: request id -> when it was to arrive, of those that entered.
    """

    start: float
    end: float
    worst_lag: float
    refused: dict[str, str]
    entered: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)


FollowUp = Callable[[Arrival, Sequence[int], float], Iterable[Arrival]]
"""What the end of a request brings: the request, its output tokens, seconds after the replay's start -> arrivals."""


def replay(
    engine: Engine,
    arrivals: Iterable[Arrival],
    *,
    on_outputs: Callable[[list[TokenOutput]], None] | None = None,
    follow_up: FollowUp | None = None,
) -> ReplayReport:
    """Run arrivals through the engine until all are served.

    Latency counts from the scheduled arrival, so a slow engine cannot slow its own load. Refused requests are recorded
    with finish_reason "refused" and the replay goes on.

    Args:
        engine: with nothing unfinished.
        arrivals: in any order.
        on_outputs: sees the outputs of every step, for progress.
        follow_up: makes arrivals of the ends of requests, refused ones included: the turns of a conversation, a closed
            loop. None leaves the loop open.

    Raises:
        PlanError, PolicyError, StalledError: from the engine; what was recorded so far stays in its records. A call of
            the policy that does not come back is a PolicyError in the main thread (overdue.py).
    """
    with overdue_calls_end(engine):
        return _replay(engine, sorted(arrivals, key=_time), on_outputs, follow_up)


def _replay(
    engine: Engine,
    pending: list[Arrival],
    on_outputs: Callable[[list[TokenOutput]], None] | None,
    follow_up: FollowUp | None,
) -> ReplayReport:
    clock = engine.clock
    start, worst_lag, refused, entered, due = clock.now(), 0.0, {}, {}, {}
    at, under_way = 0, {}

    def end(arrival: Arrival, output_token_ids: Sequence[int]) -> None:
        if follow_up is not None:
            for later in follow_up(arrival, output_token_ids, clock.now() - start):
                insort(pending, later, lo=at, key=_time)

    now = start  # not looked at anew: who is there for the first step does not depend on the machine
    while at < len(pending) or engine.has_unfinished:
        while at < len(pending) and start + pending[at].time <= now:
            arrival = pending[at]
            at += 1
            worst_lag = max(worst_lag, now - start - arrival.time)
            why = add_arrival(engine, arrival, start)
            if why is not None:
                refused[arrival.request_id] = why
                end(arrival, ())
            else:
                entered[arrival.request_id], due[arrival.request_id] = now, start + arrival.time
                under_way[arrival.request_id] = arrival
        if engine.has_unfinished:
            outputs = engine.step()
            if on_outputs is not None:
                on_outputs(outputs)
            for output in outputs:
                if output.finish_reason is not None:
                    end(under_way.pop(output.request.id), output.request.output_token_ids)
            if not (engine.idle and at < len(pending)):
                now = clock.now()
                continue
        if at < len(pending):
            clock.sleep_until(min(start + pending[at].time, math.inf if engine.wake_at is None else engine.wake_at))
        now = clock.now()
    return ReplayReport(start, clock.now(), worst_lag, refused, entered, due)


def _time(arrival: Arrival) -> float:
    return arrival.time


def add_arrival(engine: Engine, arrival: Arrival, start: float = 0.0) -> str | None:
    """Queue one arrival; returns why it was refused, of which a record is left, or None."""
    try:
        engine.add_request(
            arrival.request_id,
            arrival.prompt_token_ids,
            arrival.sampling,
            arrival_time=start + arrival.time,
            priority=arrival.priority,
            client=arrival.client,
            deadline=None if arrival.deadline is None else start + arrival.deadline,
            predicted_tokens=arrival.predicted_tokens,
            computed_tokens=arrival.computed_tokens,
        )
    except RequestError as error:
        refused = Request(arrival.request_id, arrival.prompt_token_ids, arrival.sampling,
                          arrival_time=start + arrival.time, max_tokens=arrival.sampling.max_tokens or 0)  # fmt: skip
        record = RequestRecord.of(refused)
        record.finish_reason = "refused"
        record.client, record.priority = arrival.client, arrival.priority
        engine.records.add_request(record)
        return str(error)
    return None
