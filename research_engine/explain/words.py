"""A request's life in words: arrived, waited behind whom and why, admitted, chunks, preempted by whom, finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from research_engine.engine.contract import Fact
from research_engine.metrics import e2e, tpot, ttft

from .life import Admission, Eviction, Life, Span

SHOWN = 6  # names or reasons in a sentence


def tell(life: Life) -> list[str]:
    """One sentence or two an event, with times relative to the request's arrival."""
    record, lines = life.record, [_arrival(life)]
    if record.finish_reason == "refused":
        return [*lines, "It was refused when it was added; nothing of it was ever queued."]
    waits: list[Span] = []
    for event in life.events:
        if isinstance(event, Span) and event.kind == "waiting":
            waits.append(event)
            continue
        at = f"{_seconds(_start(event) - record.arrival_time)}, step {_step(event)}"
        if isinstance(event, Admission):
            lines += [f"{at}: {line}" for line in _admission(event, waits, record.arrival_time)]
            waits = []
        elif isinstance(event, Eviction):
            lines.append(f"{at}: {_eviction(event)}")
        else:
            lines.append(f"{at}: {_work(event)}")
    if waits:
        lines.append(
            f"{_seconds(waits[0].start - record.arrival_time)}: {_waited(waits)}, and was never admitted again."
        )
    return [*lines, _end(life)]


def _arrival(life: Life) -> str:
    record = life.record
    whose = f" of client {record.client}" if record.client else ""
    several = f" ({life.namesakes} requests had this id; this is the last)" if life.namesakes > 1 else ""
    wants = f"{record.prompt_tokens} prompt tokens, at most {record.max_tokens} to come"
    who = f"Request {record.request_id}{whose}{several}, priority {record.priority}"
    return f"{who}: {wants}. It arrived at {record.arrival_time:.6g} s."


def _admission(event: Admission, waits: Sequence[Span], arrival: float) -> list[str]:
    lines = []
    if waits:
        lines.append(f"{_waited(waits)}.")
    if event.before:
        earlier = [name for name, came in event.before.items() if came <= arrival]
        later = [name for name, came in event.before.items() if came > arrival]
        groups = [(earlier, "had arrived before it"), (later, "had arrived after it")]
        parts = [f"{len(names)} {what} ({_names(names)})" for names, what in groups if names]
        lines.append(f"{_count(len(event.before), 'other')} came to run while it waited: {'; '.join(parts)}.")
    found = f", {event.computed} of its tokens found computed" if event.computed else ""
    lines.append(f"admitted after {_seconds(event.waited)}{found}{_by(event.seen)}.")
    return lines


def _waited(waits: Sequence[Span]) -> str:
    """Seconds and steps, and the reasons, longest first."""
    total, steps = sum(wait.end - wait.start for wait in waits), sum(wait.steps for wait in waits)
    by_reason: dict[str, list[Span]] = {}
    for wait in waits:
        by_reason.setdefault(wait.reason, []).append(wait)
    ordered = sorted(by_reason.items(), key=lambda item: -sum(span.end - span.start for span in item[1]))
    told = []
    for reason, spans in ordered[:SHOWN]:
        if reason:
            numbers = _change(spans[0].seen, spans[-1].seen_last)
            told.append(f"{_seconds(sum(span.end - span.start for span in spans))} {reason}{numbers}")
    more = f"; {len(ordered) - SHOWN} more reasons" if len(ordered) > SHOWN else ""
    why = f": {'; '.join(told)}{more}" if told else ""
    return f"had waited {_seconds(total)} ({_count(steps, 'step')} served others){why}"


def _eviction(event: Eviction) -> str:
    by = event.by.removeprefix("made room for ")
    why = f" ({event.why})" if event.why else ""
    if event.mode == "swap":
        cost = f"{_count(event.blocks_swapped, 'block')} moved to the host, no token is computed again"
    else:
        cost = f"{_count(event.tokens_lost, 'computed token')} lost"
    price = f"{_count(event.blocks_freed, 'block')} freed, {cost}"
    return f"preempted by {event.mode} to make room for {by}{why}{_by(event.seen)}: {price}."


def _work(span: Span) -> str:
    lasted = _seconds(span.end - span.start)
    if span.kind == "paused":
        why = f": {span.reason}{_change(span.seen, span.seen_last)}" if span.reason else ""
        return f"paused for {lasted}, {_count(span.steps, 'step')}{why}."
    if span.kind == "decode":
        return f"decoded {_count(span.drawn, 'token')} in {lasted}, {_count(span.steps, 'step')}."
    again = f", {span.recomputed} of them for the second time" if span.recomputed else ""
    chunks = "one step" if span.steps == 1 else f"{span.steps} chunks"
    first = ", and drew a token" if span.drawn else ""
    return f"computed {_count(span.tokens, 'token')} in {chunks}, {lasted}{again}{first}."


def _end(life: Life) -> str:
    record = life.record
    if record.finish_time is None:
        return "It has no end in these records."
    lost = [event for event in life.events if isinstance(event, Eviction)]
    text = f"{_seconds(record.finish_time - record.arrival_time)}: ended ({record.finish_reason}) with "
    text += f"{record.output_tokens} output tokens"
    if record.first_token_time is not None:
        per_token = "" if record.output_tokens < 2 else f", TPOT {tpot(record) * 1e3:.3g} ms"
        text += f"; TTFT {_seconds(ttft(record))}{per_token}, E2E {_seconds(e2e(record))}"
    if lost:
        text += f"; preempted {_count(len(lost), 'time')}, {record.recomputed_tokens} tokens computed again"
    return text + "."


def _start(event: Span | Admission | Eviction) -> float:
    return event.start if isinstance(event, Span) else event.time


def _step(event: Span | Admission | Eviction) -> str:
    if not isinstance(event, Span):
        return str(event.step)
    return str(event.first_step) if event.first_step == event.last_step else f"{event.first_step}-{event.last_step}"


def _by(seen: Mapping[str, Fact]) -> str:
    return f" [{', '.join(f'{name} {_fact(fact)}' for name, fact in seen.items())}]" if seen else ""


def _change(first: Mapping[str, Fact], last: Mapping[str, Fact]) -> str:
    """The numbers at first, and at last where they differ."""
    names = [name for name in first if name in last]
    told = [
        f"{name} {_fact(first[name])}" + (f" to {_fact(last[name])}" if last[name] != first[name] else "")
        for name in names
    ]
    return f" [{', '.join(told)}]" if told else ""


def _fact(fact: Fact) -> str:
    return f"{fact:.6g}" if isinstance(fact, float) else str(fact)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if abs(seconds) < 1 else f"{seconds:.4g} s"
