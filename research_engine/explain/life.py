"""What happened to one request, put together from a run's records and its decision log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from research_engine.engine.contract import Fact
from research_engine.engine.decision_log import Decision
from research_engine.engine.records import Records, RequestRecord, StepRecord

Kind = Literal["waiting", "prefill", "decode", "paused"]


@dataclass
class Span:
    """A stretch of time in which one thing went on. Times are clock seconds, steps are numbers of engine steps.

    Attributes:
        kind: what went on: `waiting` (holds no blocks), `prefill` (known tokens computed, of a prompt or again after a
            preemption), `decode` (a token a step), `paused` (holds blocks and got nothing).
        start, end: of the time.
        first_step, last_step: in which it went on; of a wait, those that served others.
        steps: how many.
        tokens: computed in it.
        recomputed: of them, computed before.
        drawn: tokens that came out.
        reason: why, as the policy said, for waits and pauses.
        seen, seen_last: by which numbers, in the first and the last of its steps.
    """

    kind: Kind
    start: float
    end: float
    first_step: int
    last_step: int
    steps: int = 1
    tokens: int = 0
    recomputed: int = 0
    drawn: int = 0
    reason: str = ""
    seen: Mapping[str, Fact] = field(default_factory=dict)
    seen_last: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class Admission:
    """It went from waiting to running.

    Attributes:
        step, time: when.
        waited: seconds since it arrived or was preempted.
        computed: tokens that it found computed.
        reason, seen: why and by which numbers, as the policy said.
        before: requests admitted while it waited, in order, and when they had arrived.
    """

    step: int
    time: float
    waited: float
    computed: int
    reason: str
    seen: Mapping[str, Fact]
    before: Mapping[str, float]


@dataclass(frozen=True)
class Eviction:
    """It was preempted.

    Attributes:
        step, time: when.
        mode: `recompute` or `swap`.
        by: the plan's reason; names the request that it made room for.
        why, seen: how it came to be the victim, and by which numbers, as the policy said.
        blocks_freed, tokens_lost, blocks_swapped: what it brought and cost.
    """

    step: int
    time: float
    mode: str
    by: str
    why: str
    seen: Mapping[str, Fact]
    blocks_freed: int
    tokens_lost: int
    blocks_swapped: int


Event = Span | Admission | Eviction


@dataclass(frozen=True)
class Life:
    """One request from its arrival to its end.

    Attributes:
        record: its record.
        events: in order of time.
        namesakes: requests of the same id in the run, this one included; the last of them is told.
        others: request id -> spans, of those that it has to do with: who ran while it waited, or took its place.
    """

    record: RequestRecord
    events: Sequence[Event]
    namesakes: int
    others: Mapping[str, Sequence[Span]]

    @property
    def spans(self) -> list[Span]:
        return [event for event in self.events if isinstance(event, Span)]


def life_of(records: Records, decisions: Sequence[Decision], request_id: str, *, others: int = 8) -> Life:
    """The life of the last request of that id.

    Args:
        records, decisions: of one run.
        others: spans of so many other requests at most, those first that have most to do with it.

    Raises:
        ValueError: no request of that id; names some that are nearest.
    """
    found = [record for record in records.requests if record.request_id == request_id]
    if not found:
        raise ValueError(f"no request {request_id!r} in this run; {_nearest(request_id, records)}")
    record = max(found, key=lambda one: one.arrival_time)
    by_id = {one.request_id: one for one in records.requests}
    by_step = {decision.step: decision for decision in decisions}
    events = _Walk(record, by_id, by_step).over(records.steps)
    about = {}
    for name in _involved(record, events)[:others]:
        if name in by_id:
            walked = _Walk(by_id[name], by_id, {}).over(records.steps)
            about[name] = [event for event in walked if isinstance(event, Span)]
    return Life(record, events, len(found), about)


class _Walk:
    """Goes over a run's steps and notes what they meant to one request."""

    def __init__(
        self, record: RequestRecord, by_id: Mapping[str, RequestRecord], decisions: Mapping[int, Decision]
    ) -> None:
        self._record = record
        self._by_id = by_id
        self._decisions = decisions
        self._events: list[Event] = []
        self._waits = True
        self._since = record.arrival_time  # when it began to wait
        self._before: dict[str, float] = {}
        self._computed_once = self._drawn = 0

    def over(self, steps: Sequence[StepRecord]) -> list[Event]:
        record, admitted, last = self._record, set[str](), 0
        end = record.arrival_time if record.finish_time is None else record.finish_time
        for step in steps:
            at_the_end = step.started == end and record.request_id in step.request_ids  # a step that took no time
            if record.arrival_time <= step.started and (step.started < end or at_the_end):
                self._one(step, admitted)
                last = step.step
            admitted.update(step.request_ids)
            admitted.difference_update(event.request_id for event in step.preemptions)
        if self._waits:
            self._end_wait(end, last)
        return self._events

    def _one(self, step: StepRecord, admitted: set[str]) -> None:
        name = self._record.request_id
        decision = self._decisions.get(step.step)
        said = (
            ("", {}) if decision is None else (decision.reasons.get(name, decision.rest), decision.seen.get(name, {}))
        )
        for event in step.preemptions:
            if event.request_id == name and not self._waits:
                cost = event.blocks_freed, event.tokens_lost, event.blocks_swapped
                self._events.append(Eviction(step.step, step.started, event.mode, event.reason, *said, *cost))
                self._waits, self._since, self._before = True, step.started, {}
                said = "gives its place up", {}
        if name in step.request_ids:
            self._serve(step, step.request_ids.index(name), said)
        elif self._waits:
            self._extend("waiting", step, self._since, *said)
            new = (other for other in step.request_ids if other not in admitted and other in self._by_id)
            self._before |= {other: self._by_id[other].arrival_time for other in new}
        else:
            self._extend("paused", step, step.started, *said)

    def _serve(self, step: StepRecord, row: int, said: tuple[str, Mapping[str, Fact]]) -> None:
        start, num_tokens, drew = step.starts[row], step.num_tokens[row], step.drew[row]
        if self._waits:
            self._end_wait(step.started, step.step)
            waited = step.started - self._since
            self._events.append(Admission(step.step, step.started, waited, start, *said, dict(self._before)))
            self._waits = False
        known = self._record.prompt_tokens + self._drawn
        kind: Kind = "decode" if self._drawn and num_tokens == 1 and start == known - 1 else "prefill"
        span = self._extend(kind, step, step.started, "", {})
        end = start + num_tokens
        span.tokens += num_tokens
        span.recomputed += max(0, min(self._computed_once, end) - start)
        span.drawn += drew
        self._drawn += drew
        self._computed_once = max(self._computed_once, end)

    def _extend(self, kind: Kind, step: StepRecord, since: float, reason: str, seen: Mapping[str, Fact]) -> Span:
        """One more step of what goes on, or the first of something else, which began where the last thing ended."""
        last = self._events[-1] if self._events else None
        if not (isinstance(last, Span) and (last.kind, last.reason) == (kind, reason)):
            before = next((event for event in reversed(self._events) if isinstance(event, Span)), None)
            if before is not None:
                since = before.end = max(since, step.started)
            last = Span(kind, since, since, step.step, step.step, 0, reason=reason, seen=seen)
            self._events.append(last)
        last.last_step, last.end, last.steps, last.seen_last = step.step, step.executed, last.steps + 1, seen
        return last

    def _end_wait(self, until: float, step: int) -> None:
        """A wait into which no step fell gets its span here."""
        last = self._events[-1] if self._events else None
        if isinstance(last, Span) and last.kind == "waiting":
            last.end = until
        elif until > self._since:
            self._events.append(Span("waiting", self._since, until, step, step, 0))


def _involved(record: RequestRecord, events: Sequence[Event]) -> list[str]:
    """Other requests in the order in which they matter: took its place, stood in its way, went before it."""
    names = [event.by.removeprefix("made room for ") for event in events if isinstance(event, Eviction)]
    behind = "waits behind "
    blocked = (event.reason for event in events if isinstance(event, Span) and event.reason.startswith(behind))
    names += [reason.removeprefix(behind).partition(",")[0] for reason in blocked]
    for event in events:
        if isinstance(event, Admission):
            names += reversed(list(event.before))
    return [name for name in dict.fromkeys(names) if name != record.request_id]


def _nearest(request_id: str, records: Records) -> str:
    import difflib

    names = list(dict.fromkeys(record.request_id for record in records.requests))
    near = difflib.get_close_matches(request_id, names, n=5, cutoff=0.3) or names[:5]
    return f"there are {len(names)}, the nearest: {', '.join(near)}" if names else "there are none at all"
