"""Seats: what a step has to write is what changed, whoever came, went, was preempted or came back under an old id."""

from __future__ import annotations

import random

import pytest

from research_engine.engine.contract import Request, ScheduledRequest
from research_engine.engine.sampling_params import SamplingParams
from research_engine.executors.seats import Seats


def row(request: Request, changed: int) -> ScheduledRequest:
    return ScheduledRequest(request, 0, 1, True, changed)


def named(name: str, blocks: list[int]) -> Request:
    request = Request(name, [0], SamplingParams(), arrival_time=0.0, max_tokens=4)
    request._block_ids = blocks
    return request


class Table:
    """What the device's tables hold after the writes."""

    def __init__(self, seats: Seats) -> None:
        self.cells = [-1] * (seats.num_seats * seats.width)
        self.seats = seats

    def update(self, rows: list[ScheduledRequest]) -> int:
        changes = self.seats.update(rows)
        for cell, block in zip(changes.cells, changes.blocks, strict=True):
            self.cells[cell] = block
        assert len(set(changes.seats)) == len(rows)
        for seat, (request, *_) in zip(changes.seats, rows, strict=True):
            start = seat * self.seats.width
            assert self.cells[start : start + len(request.block_ids)] == list(request.block_ids)
        return len(changes.cells)


def test_a_decoding_request_writes_an_entry_when_it_gets_a_block_and_nothing_else():
    table, request = Table(Seats(2, 8)), named("a", [5, 6])
    assert table.update([row(request, 0)]) == 2
    assert table.update([row(request, 2)]) == 0
    request._block_ids.append(9)
    assert table.update([row(request, 2)]) == 1
    request._block_ids[1] = 4  # copied on write
    assert table.update([row(request, 1)]) == 2


def test_an_id_that_comes_back_writes_its_own_blocks():
    table = Table(Seats(2, 8))
    table.update([row(named("a", [1, 2, 3]), 0)])
    assert table.update([row(named("a", [7]), 0)]) == 1


def test_a_request_that_lost_its_seat_sits_down_anew():
    table = Table(Seats(2, 4))
    a, b, c = named("a", [1]), named("b", [2]), named("c", [3])
    table.update([row(a, 0), row(b, 0)])
    table.update([row(c, 0), row(a, 1)])
    assert table.update([row(b, 1)]) == 1


def test_any_history_leaves_every_row_with_its_own_table():
    for seed in range(200):
        rng = random.Random(seed)
        table, live = Table(Seats(rng.randint(1, 5), 6)), {}
        for _ in range(40):
            if rng.random() < 0.4:
                name = rng.choice("abcdefg")
                live[name] = (named(name, [rng.randrange(100) for _ in range(rng.randint(1, 3))]), 0)
            chosen = rng.sample(sorted(live), min(len(live), rng.randint(1, table.seats.num_seats)))
            rows = []
            for name in chosen:
                request, changed = live[name]
                if rng.random() < 0.3 and len(request.block_ids) < 6:
                    request._block_ids.append(rng.randrange(100))
                rows.append(row(request, changed))
                live[name] = (request, len(request.block_ids))
            if rows:
                table.update(rows)


def test_more_rows_than_seats_or_blocks_than_entries_are_refused():
    with pytest.raises(ValueError, match="3 requests in one step; the executor has 2 seats"):
        Seats(2, 4).update([row(named(name, [1]), 0) for name in "abc"])
    with pytest.raises(ValueError, match="'a' holds 5 blocks; its table has 4 entries"):
        Seats(2, 4).update([row(named("a", [1] * 5), 0)])
