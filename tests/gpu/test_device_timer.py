"""On a GPU: what holds the device back is not in a step's time, and a profile of a small model tells graphs apart."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from research_engine.calibration.device_timer import timer_of
from research_engine.calibration.profile import ProfileOptions, fit, measure
from tests.conftest import cuda_reason

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if reason := cuda_reason():
        pytest.skip(reason)


def test_the_time_that_a_device_is_held_is_not_counted():
    timer, held = timer_of("cuda"), 0.4
    numbers = torch.ones(1024, 1024, device="cuda")
    numbers @ numbers  # the first product of a process loads a library, which may take longer than the device is held
    torch.cuda.synchronize()
    timer.begin(held)
    numbers @ numbers
    timer.end()
    assert 0 < timer.seconds() < held / 2


def test_a_profile_of_a_gpu_has_a_table_for_its_graphs_and_host_time_for_handing_them_over():
    options = ProfileOptions("dummy:tiny", device="cuda", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512,
                             kv_cache_memory=0.1)  # fmt: skip
    # a clock that moves by a second whenever it is read: ten minutes are up after 600 readings, on any machine
    profile = fit(measure(options, lambda share, text: None, clock=count(0.0, 1.0).__next__))
    assert profile.overlap
    assert profile.ladders.decode[-1] == 8
    assert profile.decode_graph is not None
    assert profile.token_graph is not None
    assert all(seconds > 0 for _, seconds in profile.decode_graph.points)
    assert {kind.value for kind in profile.host.handover} >= {"decode graph", "token graph"}
