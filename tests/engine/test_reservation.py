"""What each reservation makes a request hold, what it keeps free of, and how the waste it makes is split."""

from __future__ import annotations

import random
import re

import pytest

from research_engine import metrics
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import SchedulePlan
from research_engine.engine.request import Request
from research_engine.engine.reservation import RESERVATIONS, blocks_for, known_output_tokens
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS

from .shadow import ManualClock, drain, greedy, make_engine


def a_request(prompt: int = 10, most: int = 25, predicted: int | None = None, **sampling) -> Request:
    stop_ids = frozenset(sampling.pop("stop_ids", ()))
    own = greedy(most, **sampling)
    return Request("r", range(prompt), own, arrival_time=0.0, max_tokens=most, predicted_tokens=predicted,
                   stop_token_ids=stop_ids)  # fmt: skip


def slots(reservation: str, request: Request, num_tokens: int, **sizes) -> int:
    config = EngineConfig(
        **{"num_blocks": 1000, "block_size": 1, "max_model_len": 200, **sizes}, reservation=reservation
    )
    return blocks_for(config)(request, num_tokens)


@pytest.mark.parametrize(
    ("reservation", "expected"),
    [("paged", 10), ("reserve_max", 200), ("reserve_pow2", 10 + 32), ("reserve_oracle", 10 + 25 - 1)],
)
def test_the_papers_example_of_25_output_tokens(reservation, expected):
    """Section 6.1: pow2 reserves 32 positions for an output of 25 tokens; a last token is never stored."""
    assert slots(reservation, a_request(prompt=10, most=25), 10) == expected


@pytest.mark.parametrize(("reservation", "expected"), [("buddy_pow2", 64), ("buddy_oracle", 64)])
def test_a_buddy_allocators_chunk_is_a_power_of_two_of_slots(reservation, expected):
    """42 and 34 slots are wanted; blocks of 3 slots hold no power of two, so the last one is a little longer."""
    assert slots(reservation, a_request(prompt=10, most=25), 10) == expected
    assert slots(reservation, a_request(prompt=10, most=25), 10, block_size=4) == expected / 4
    assert slots(reservation, a_request(prompt=10, most=25), 10, block_size=3) == 22
    assert slots(reservation, a_request(prompt=10, most=25), 10, num_blocks=50) == 50  # never more than there are


def test_a_forced_length_is_known_whatever_was_predicted():
    assert known_output_tokens(a_request(most=25, predicted=3)) == 25
    assert known_output_tokens(a_request(most=25, predicted=3, stop_ids=[7])) == 3
    assert known_output_tokens(a_request(most=25, predicted=99, stop_ids=[7])) == 25
    assert known_output_tokens(a_request(most=25, predicted=3, stop="x")) == 3
    assert known_output_tokens(a_request(most=25, predicted=0, stop_ids=[7])) == 1
    assert known_output_tokens(a_request(most=25, stop_ids=[7])) is None


def test_pow2_doubles_with_the_output_where_nothing_is_known():
    request = a_request(prompt=10, most=25, stop_ids=[7])
    assert [slots("reserve_pow2", request, n) for n in (3, 10, 11, 12, 13, 15, 19)] == [11, 11, 11, 12, 14, 18, 26]


def test_a_prediction_too_short_is_outgrown():
    request = a_request(prompt=10, most=25, predicted=5, stop_ids=[7])
    assert [slots("reserve_oracle", request, n) for n in (10, 14, 15, 30)] == [14, 14, 15, 30]
    assert [slots("reserve_pow2", request, n) for n in (10, 18, 19, 27)] == [18, 18, 26, 42]


def test_no_reservation_is_more_than_the_cache_or_less_than_the_tokens_and_all_grow_with_them():
    rng = random.Random(0)
    for _ in range(300):
        size, blocks = rng.randint(1, 9), rng.randint(3, 20)
        most = rng.randint(1, size * blocks - 1)
        prompt = rng.randint(1, size * blocks - most)
        request = a_request(prompt, most, rng.choice([None, 0, 3, 500]), stop_ids=rng.choice([[], [7]]))
        for reservation in RESERVATIONS:
            sizes = {"num_blocks": blocks, "block_size": size, "max_model_len": rng.randint(2, 400)}
            config = EngineConfig(**sizes, reservation=reservation)
            held = [blocks_for(config)(request, n) for n in range(1, prompt + most)]
            assert held == sorted(held) and held[-1] <= blocks
            assert all(count * size >= n for n, count in enumerate(held, 1))


@pytest.mark.parametrize(("reservation", "blocks"), [("paged", 1), ("reserve_max", 8), ("reserve_pow2", 3),
                                                     ("reserve_oracle", 3)])  # fmt: skip
def test_blocks_reserved_are_taken_on_admission_and_held(reservation, blocks):
    """Prompt 4 and 7 forced tokens in blocks of 4, max_model_len 32; a chunk of 1 token admits."""
    engine = make_engine(FCFS(), reservation=reservation, max_model_len=32, max_num_batched_tokens=1)
    (request,) = engine.add_request("r", range(4), greedy(7))
    assert engine.view().ledger().cost(request, 1) == blocks
    engine.step()
    assert (request.num_blocks, engine.kv_cache.num_used_blocks) == (blocks, blocks)
    held = set()
    while engine.has_unfinished:
        held.add(request.num_blocks)
        engine.step()
    assert held == ({1, 2, 3} if reservation == "paged" else {blocks})


def test_a_request_that_reserved_is_never_preempted_for_want_of_blocks():
    """Where the final lengths are held from the start, nobody can run out; paged has to preempt in the same runs."""
    events = {}
    for reservation in ("paged", "reserve_oracle"):
        engine = make_engine(ChunkedPrefill(watermark=0.0), num_blocks=9, reservation=reservation)
        for index in range(8):
            engine.add_request(str(index), range(100 * index, 100 * index + 5), greedy(12))
        drain(engine)
        events[reservation] = sum(len(step.preemptions) for step in engine.records.steps)
    assert events["paged"] > 0 == events["reserve_oracle"]


def test_a_swap_moves_tokens_and_not_reserved_blocks():
    engine = make_engine(FCFS(), reservation="reserve_max", max_model_len=32, num_host_blocks=2)
    (request,) = engine.add_request("r", range(5), greedy(4))
    engine.step()
    assert request.num_blocks == 8
    view = engine.view()
    ledger = view.ledger()
    assert ledger.can_swap(request)
    from research_engine.engine.contract import Preemption

    batch = engine.commit(SchedulePlan({}, [Preemption("r", "swap")]), view)
    assert (len(batch.swap_out), engine.kv_cache.num_free_host_blocks) == (2, 0)
    engine.update(batch, engine.execute(batch))
    drain(engine)
    assert engine.records.steps[2].blocks_swapped_in == 2


def test_waste_is_split_as_the_reservation_makes_it():
    """Prompt 3, output 4, blocks of 4, max_model_len 16: 6 slots are filled in the end, 16 held, of a cache of 20."""
    engine = make_engine(
        FCFS(), reservation="reserve_max", max_model_len=16, num_blocks=5, clock=ManualClock(1.0), max_num_seqs=2
    )
    engine.add_request("a", range(3), greedy(4))
    engine.add_request("b", range(50, 53), greedy(4))
    engine.step()
    engine.step()
    first = metrics.kv_split(engine.records, block_size=4)
    drain(engine)
    assert first.external == pytest.approx(4 / 20)  # b waits, and the block that is left is too little for it
    split = metrics.kv_split(engine.records, block_size=4)
    usage = metrics.kv_usage(engine.records, block_size=4)
    assert sum((split.token_states, split.reserved, split.internal, split.external)) == pytest.approx(1.0)
    # the last step of each request gave its blocks back; in the others 3, 4, 5 tokens are stored of the 6
    assert usage.internal == pytest.approx(10 / 16)
    assert usage.utilization == pytest.approx((3 + 4 + 5) / 48)
    assert usage.reserved == pytest.approx((3 + 2 + 1) / 48)


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_the_split_sums_to_one_and_knows_no_external_waste_without_a_queue(reservation):
    engine = make_engine(FCFS(), reservation=reservation, num_blocks=64, clock=ManualClock(0.1), max_model_len=32)
    for index in range(4):
        engine.add_request(str(index), range(100 * index, 100 * index + 5), greedy(3 + index))
    drain(engine)
    split = metrics.kv_split(engine.records, block_size=4)
    assert split.external == 0
    assert split.token_states + split.reserved + split.internal == pytest.approx(1.0)


def test_the_papers_order_of_waste_appears():
    """Figure 2: token states fill most of a paged cache, then of the oracle's, of pow2's and least of max's."""
    shares = {}
    for reservation in RESERVATIONS:
        engine = make_engine(FCFS(), reservation=reservation, num_blocks=64, clock=ManualClock(0.1), max_model_len=128)
        rng = random.Random(1)
        for index in range(40):
            engine.add_request(str(index), [1000 * index + i for i in range(rng.randint(5, 30))],
                               greedy(rng.choice([9, 17, 25])))  # fmt: skip
        drain(engine)
        shares[reservation] = metrics.kv_usage(engine.records, block_size=4).utilization
    order = [shares[name] for name in ("paged", "reserve_oracle", "reserve_pow2", "reserve_max")]
    assert order == sorted(order, reverse=True) and len(set(order)) == 4


def test_an_unknown_reservation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=re.escape(f"reservation = 'orca': must be one of {', '.join(RESERVATIONS)}")):
        EngineConfig(num_blocks=4, reservation="orca")  # type: ignore[arg-type]
