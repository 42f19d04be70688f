"""Batch means: as wide as they should be for independent values, wider for dependent ones, and told when too few."""

from __future__ import annotations

import numpy as np
import pytest

from research_engine.metrics import batch_means


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        found = batch_means(rng.normal(5.0, 2.0, 200).tolist())
        assert found is not None
        hits += abs(found.mean - 5.0) <= found.half_width
    assert 0.91 <= hits / 300 <= 0.99


def test_values_that_depend_on_each_other_have_a_wider_interval() -> None:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=4000)
    dependent = np.zeros(4000)
    for i in range(1, 4000):
        dependent[i] = 0.9 * dependent[i - 1] + noise[i]
    walk, free = batch_means(dependent.tolist()), batch_means((noise * dependent.std()).tolist())
    assert walk is not None and free is not None
    assert walk.half_width > 2 * free.half_width


def test_batches_that_follow_each_other_are_seen() -> None:
    found = batch_means(list(range(100)))
    assert found is not None and found.lag1 > 2 / found.batches**0.5


def test_few_values_and_wrong_batches() -> None:
    assert batch_means([1.0] * 19) is None
    constant = batch_means([1.0] * 20)
    assert constant is not None and (constant.mean, constant.half_width, constant.lag1) == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="batches = 1: must be an integer >= 2"):
        batch_means([1.0], 1)
