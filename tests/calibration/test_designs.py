"""Designed batches: all fit, every part is there from the start, and the tables have points where batches are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research_engine.calibration.designs import PARTS, Design, Limits, basis_of, make_designs

GPU = Limits(256, 8192, 131072, num_blocks=60_000, block_size=16)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 300), st.integers(16, 10_000), st.integers(200, 150_000), st.integers(64, 70_000),
    st.sampled_from([8, 16, 128]),
)  # fmt: skip
def test_every_design_can_be_run(rows, tokens, longest, blocks, size):
    limits = Limits(rows, max(rows, tokens), longest, blocks, size)
    for design in make_designs(limits, steps=7, seed=0):
        assert design.num_rows <= limits.max_num_seqs
        assert design.num_tokens <= limits.max_num_batched_tokens
        assert design.longest + 1 < limits.max_model_len
        kept = [*(kv + 8 for kv in design.decodes), *(t + k + 1 for t, k, _ in design.chunks)]
        assert sum(-(-count // size) for count in kept) <= blocks


def test_both_sides_of_a_tile_edge_are_measured():
    tokens = {design.num_tokens for design in make_designs(GPU, steps=7, seed=0) if design.part == "dense"}
    assert {64, 65, 128, 129, 256, 257, 8192} <= tokens


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_beginning_of_the_list_holds_its_share_of_every_part(share):
    designs = make_designs(GPU, steps=7, seed=3)
    first = designs[: round(share * len(designs))]
    for part in PARTS:
        own, all_own = sum(d.part == part for d in first), sum(d.part == part for d in designs)
        assert own == pytest.approx(share * all_own, abs=2)


def test_the_same_seed_gives_the_same_list():
    assert make_designs(GPU, steps=7, seed=1) == make_designs(GPU, steps=7, seed=1)
    assert make_designs(GPU, steps=7, seed=1) != make_designs(GPU, steps=7, seed=2)


def test_tables_reach_as_far_as_the_designs_and_no_farther():
    designs = make_designs(GPU, steps=7, seed=0)
    basis = basis_of(designs)
    assert (basis.dense[0], basis.dense[-1]) == (1, 8192)
    assert basis.head[-1] == 256
    assert basis.chunks[-1] == 8192
    assert basis.befores[0] == 0
    assert basis.befores[-1] == max(before for d in designs if d.part == "prefill" for _, before, _ in d.chunks)
    for table in (basis.dense, basis.head, basis.chunks, basis.befores):
        assert list(table) == sorted(set(table))


def test_a_design_of_decodes_alone_still_makes_tables():
    basis = basis_of([Design("decode", (5, 6))])
    assert (basis.dense[-1], basis.chunks, basis.befores) == (2, (1,), (0,))
