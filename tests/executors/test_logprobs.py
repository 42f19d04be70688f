"""Log-probabilities: ranks and lists are ordered by probability, then by id, also where many tie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research_engine.executors.logprobs import token_logprobs


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ranks_and_lists_follow_probability_then_id(data):
    logits = data.draw(st.lists(st.integers(-2, 2), min_size=1, max_size=12))
    token = data.draw(st.integers(0, len(logits) - 1))
    width = data.draw(st.integers(0, 14))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    entry = token_logprobs(torch.tensor([logits], dtype=torch.float32), [token], [width])[0]
    assert entry.rank == order.index(token) + 1
    assert [i for i, _ in entry.top] == order[:width]


def test_each_row_gets_as_many_as_it_asked_for():
    entries = token_logprobs(torch.zeros(3, 5), [4, 0, 1], [0, 2, 5])
    assert [len(entry.top) for entry in entries] == [0, 2, 5]
    assert [entry.logprob for entry in entries] == pytest.approx([-1.6094379124341003] * 3)
