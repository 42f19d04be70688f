"""The kept block tables always equal the requests' own, whatever came and went."""

from __future__ import annotations

import random

from research_engine.engine.contract import ScheduledRequest
from research_engine.executors.block_tables import BlockTables
from tests.executors.sampling_cases import make_request


def test_tables_equal_the_requests_own_through_growth_copies_and_returns():
    rng = random.Random(0)
    tables, live, seen = BlockTables(), {}, {}
    for _ in range(400):
        name = f"r{rng.randrange(40)}"
        if name not in live or rng.random() < 0.1:  # new, or another request of the same id
            live[name] = make_request()
            live[name]._id = name
            seen[name] = 0
        rows = []
        for request in rng.sample(list(live.values()), k=min(len(live), rng.randrange(1, 12))):
            blocks, changed = request._block_ids, len(request._block_ids)
            if rng.random() < 0.15:  # preempted and back with other blocks
                blocks[:] = [rng.randrange(1000) for _ in range(rng.randrange(1, 90))]
                changed = 0
            elif blocks and rng.random() < 0.2:  # copied on write
                changed = rng.randrange(len(blocks))
                blocks[changed] = rng.randrange(1000)
            blocks += [rng.randrange(1000) for _ in range(rng.choice([0, 0, 1, 3]))]
            if seen[request.id] == 0:
                changed = 0
            seen[request.id] = 1
            if blocks:
                rows.append(ScheduledRequest(request, 0, 1, True, changed))
            else:
                seen[request.id] = 0
        if not rows:
            continue
        where = tables.update(rows)
        taken = tables.take(where, max(len(row.request.block_ids) for row in rows))
        for row, table in zip(rows, taken.tolist(), strict=True):
            assert table[: len(row.request.block_ids)] == list(row.request.block_ids)


def test_a_batch_larger_than_all_before_gets_a_row_for_each():
    tables = BlockTables()
    rows = []
    for i in range(100):
        request = make_request()
        request._id = str(i)
        request._block_ids = [i]
        rows.append(ScheduledRequest(request, 0, 1, True, 0))
    assert tables.take(tables.update(rows), 1).ravel().tolist() == list(range(100))
