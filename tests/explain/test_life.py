"""A request's life from its run's records: nothing is left out, nothing is counted twice, and the reasons are told."""

from __future__ import annotations

import itertools
import random

import pytest

import schedulers
from research_engine.engine.decision_log import DecisionLog
from research_engine.explain import life_of, tell
from research_engine.explain.life import Admission, Eviction, Life
from research_engine.explain.picture import draw, terminal
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.priority import Priority
from schedulers.vtc import VTC
from tests.engine.random_runs import RandomRun
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def two_for_one_seat(preemption: str = "recompute") -> Life:
    """`low` runs alone, `high` takes its seat, `low` comes back."""
    log = DecisionLog()
    engine = make_engine(
        Priority(preemption=preemption), clock=ManualClock(0.5), max_num_seqs=1, num_host_blocks=16, decisions=log,
        max_num_batched_tokens=4, enable_prefix_caching=False,
    )  # fmt: skip
    engine.add_request("low", range(10), greedy(6), priority=5, client="alice")
    for _ in range(5):
        engine.step()
    engine.add_request("high", range(20, 24), greedy(2), priority=0)
    drain(engine)
    return life_of(engine.records, log.decisions, "low")


def test_the_life_of_a_request_that_lost_its_seat():
    life = two_for_one_seat()
    kinds = [event.kind if hasattr(event, "kind") else type(event).__name__ for event in life.events]
    served = ["prefill", "decode"]
    assert kinds == ["waiting", "Admission", *served, "Eviction", "waiting", "waiting", "Admission", *served]
    first, lost, back, again = life.events[2], life.events[4], life.events[7], life.events[8]
    assert (first.steps, first.tokens, first.drawn, first.recomputed) == (3, 10, 1, 0)
    assert isinstance(lost, Eviction) and (lost.by, lost.tokens_lost, lost.mode) == (
        "made room for high",
        12,
        "recompute",
    )
    assert lost.why == "gives way to high: the policy's own rule picked it of low"
    assert lost.seen["priority"] == 5 and lost.seen["tokens computed"] == 12 and lost.seen["blocks freed"] == 3
    assert (again.tokens, again.recomputed, again.drawn, again.steps) == (12, 12, 0, 3)
    assert (
        isinstance(back, Admission) and list(back.before) == ["high"] and back.before["high"] > life.record.arrival_time
    )
    assert list(life.others) == ["high"]


def test_it_is_told_in_words():
    text = "\n".join(tell(two_for_one_seat()))
    for words in (
        "Request low of client alice, priority 5: 10 prompt tokens, at most 6 to come. It arrived at 0.5 s.",
        "computed 10 tokens in 3 chunks",
        "preempted by recompute to make room for high (gives way to high: the policy's own rule picked it of low)",
        "3 blocks freed, 12 computed tokens lost.",
        "1 other came to run while it waited: 1 had arrived after it (high).",
        "waits: no seat",
        "computed 12 tokens in 3 chunks, 6 s, 12 of them for the second time",
        "ended (length) with 6 output tokens; TTFT",
        "preempted 1 time, 12 tokens computed again.",
    ):
        assert words in text, f"{words!r} is not in:\n{text}"
    assert "3 blocks moved to the host, no token is computed again" in "\n".join(tell(two_for_one_seat("swap")))


def test_a_wait_says_behind_whom_and_by_which_numbers():
    """b comes after a large request that does not fit, under a policy that goes by counters."""
    log = DecisionLog()
    engine = make_engine(VTC(watermark=0.0), clock=ManualClock(0.5), num_blocks=6, decisions=log)
    engine.add_request("runs", range(16), greedy(6), client="x")
    engine.step()
    engine.add_request("large", range(100, 120), greedy(2), client="y")
    engine.add_request("behind", range(4), greedy(2), client="z")
    drain(engine)
    behind, large = (life_of(engine.records, log.decisions, name) for name in ("behind", "large"))
    assert "waits behind large, which could not be admitted" in {span.reason for span in behind.spans}
    assert next(iter(behind.others)) == "large"
    (wait,) = [span for span in large.spans if span.reason == "waits: no blocks for it"]
    assert wait.seen["client"] == "y" and wait.seen["counter"] == 16 + 2 and wait.seen["blocks needed"] == 5
    assert "waits: no blocks for it [client y, counter" in "\n".join(tell(large))


def check(life: Life) -> None:
    """Spans tile the time from arrival to end; tokens, draws, recompute and preemptions add up to the record's."""
    record, spans = life.record, life.spans
    if record.finish_time > record.arrival_time:
        assert spans[0].start == record.arrival_time
        assert all(one.end == next_.start for one, next_ in itertools.pairwise(spans))
        assert abs(spans[-1].end - record.finish_time) < 0.5 or record.finish_reason == "abort"
    lost = sum(span.drawn for span in spans) - record.output_tokens
    assert lost == 0 or (lost == 1 and record.finish_reason == "abort")  # a token under way when it was aborted
    assert sum(span.recomputed for span in spans) == record.recomputed_tokens
    assert sum(isinstance(event, Eviction) for event in life.events) == record.preemptions
    assert all(span.tokens == 0 for span in spans if span.kind in ("waiting", "paused"))


@pytest.mark.parametrize("name", schedulers.available())
def test_nothing_is_left_out_and_nothing_counted_twice(name):
    """Random runs with every way of losing one's place; each story can be told and drawn as text."""
    rng, told = random.Random(name), 0
    for seed in range(12):
        log = DecisionLog()
        way = rng.choice(["recompute", "swap"])
        run = RandomRun(seed, lambda _, way=way: schedulers.create(name, preemption=way), aborts=0.02, decisions=log)
        run.finish()
        records = run.engine.records
        for request_id in {record.request_id for record in records.requests}:
            life = life_of(records, log.decisions, request_id, others=3)
            if life.namesakes == 1:
                check(life)
                told += 1
            lines = tell(life)
            assert lines[0].startswith(f"Request {request_id}") and life.record.finish_reason in lines[-1]
            picture = terminal(life, 80).plain.splitlines()
            assert len(picture) == 3 + len(life.others) and max(map(len, picture)) <= 90
    assert told > 25


def test_the_picture_is_a_file(tmp_path):
    life = two_for_one_seat()
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        draw(life, tmp_path / f"life{suffix}")
        assert (tmp_path / f"life{suffix}").read_bytes().startswith(magic)


def test_an_unknown_request_is_told_with_those_that_are_nearest():
    engine = make_engine(ChunkedPrefill())
    for name in ("request-1", "request-2"):
        engine.add_request(name, [1], greedy(1))
    drain(engine)
    with pytest.raises(
        ValueError, match="no request 'reqest-1' in this run; there are 2, the nearest: request-1, request-2"
    ):
        life_of(engine.records, [], "reqest-1")


def test_without_decisions_the_story_has_no_reasons_but_is_whole():
    engine = make_engine(ChunkedPrefill(), max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, [1, 2], greedy(2))
    drain(engine)
    life = life_of(engine.records, [], "b")
    check(life)
    assert all(not span.reason for span in life.spans)
