"""The ladder of graph sizes, and the choice of one."""

from __future__ import annotations

import pytest
import torch

from research_engine.executors.step_graphs import StepGraphs, ladder, token_ladder, worth_keeping


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 100, 256, 1000, 1024])
def test_a_ladder_reaches_its_end_and_pads_by_an_eighth_or_eight_rows_at_most(most):
    sizes = ladder(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(8, rows / 8), (rows, size)


def test_steps_with_prompts_are_captured_as_long_as_launching_them_takes_longer_than_computing_them():
    assert token_ladder(8192, 135_000_000) == list(range(64, 1025, 64))
    assert token_ladder(8192, 8_000_000_000) == list(range(64, 1025, 64))
    assert token_ladder(300, 1) == [64, 128, 192, 256]
    assert token_ladder(8192, 70_000_000_000) == [64]


def test_without_a_gpu_every_size_is_run_as_it_is():
    ran = []
    graphs = StepGraphs(lambda size: ran.append(size) or torch.zeros(size), ladder(64), torch.device("cpu"))
    assert graphs.padded(13) == 13
    assert graphs.run(13).shape == (13,)
    graphs.capture_all()
    assert ran == [13]


def test_a_size_that_takes_clearly_longer_than_a_larger_one_is_not_kept():
    milliseconds = {384: 9.67, 448: 15.45, 512: 11.89, 576: 14.43, 640: 14.58, 832: 20.48, 896: 20.01}
    assert worth_keeping({size: each / 1000 for size, each in milliseconds.items()}) == [384, 512, 576, 640, 832, 896]


def test_of_sizes_that_take_alike_all_are_kept_and_the_largest_always_is():
    assert worth_keeping({8: 1.02, 16: 1.01, 24: 1.0}) == [8, 16, 24]
    assert worth_keeping({1: 9.0, 2: 9.0, 4: 1.0}) == [4]
    assert worth_keeping({}) == []
