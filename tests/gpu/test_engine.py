"""The engine on a GPU: graphs, overlap, chunks and the prefix cache change no token, and a step waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from research_engine import LLM, SamplingParams
from research_engine.options import OptionError
from tests.conftest import cuda_reason

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(3 + 11 * i % 90)] for i in range(24)]
PARAMS = [
    SamplingParams(
        temperature=0.0 if i % 3 == 0 else 0.8, top_p=1.0 if i % 3 == 1 else 0.9, seed=i, max_tokens=4 + 7 * i % 40,
        ignore_eos=i % 2 == 0, presence_penalty=0.3 if i % 7 == 5 else 0.0, logprobs=2 if i % 5 == 4 else None,
    )
    for i in range(24)
]  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if reason := cuda_reason():
        pytest.skip(reason)


@contextmanager
def tiny(**options: object) -> Iterator[LLM]:
    defaults = {"dtype": "float32", "device": "cuda", "num_blocks": 400, "max_num_seqs": 16, "max_model_len": 256,
                "check_integrity": True}  # fmt: skip
    llm = LLM("dummy:tiny", **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.shutdown()


def tokens(**options: object) -> list[list[int]]:
    with tiny(**options) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    if reason := cuda_reason():
        pytest.skip(reason)
    return tokens(enforce_eager=True, overlap=False, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("eager", "overlap", "budget", "caching"),
    list(itertools.product([True, False], [True, False], [32, 2048], [True, False])),
)
def test_graphs_overlap_chunks_and_prefix_cache_change_no_token(plain, eager, overlap, budget, caching):
    got = tokens(enforce_eager=eager, overlap=overlap, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    assert got == plain


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_changes_no_token(plain, preemption):
    options = {"num_blocks": 34, "block_size": 8, "num_host_blocks": 200}
    assert tokens(scheduler_params={"preemption": preemption}, **options) == plain


def test_the_cpu_draws_the_same_tokens(plain):
    assert tokens(device="cpu", enforce_eager=True) == plain


def test_a_graph_serves_batches_smaller_than_its_own_and_lengths_it_never_saw():
    """Captured at start with empty tables, replayed from 1 to 16 rows and up to the longest context."""
    with (
        tiny(max_model_len=4096, num_blocks=600, block_size=16) as llm,
        tiny(max_model_len=4096, num_blocks=600, block_size=16, enforce_eager=True, overlap=False) as other,
    ):
        prompts = [[(i * j) % 250 for j in range(1, 4000, 1 + i % 3)][: 40 * i * i + 5] for i in range(10)]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for some in (prompts, prompts[:1], prompts[3:6]):
            ours = llm.generate(some, params, use_tqdm=False)
            theirs = other.generate(some, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]


def test_handing_a_decode_step_over_waits_for_nothing():
    """cudaStreamSynchronize and the like raise in this mode, which torch watches its own calls with."""
    with tiny(max_num_seqs=4) as llm:
        engine = llm.engine
        for i in range(4):
            engine.add_request(
                str(i), PROMPTS[i], SamplingParams(temperature=0.7, seed=i, max_tokens=30, ignore_eos=True)
            )
        for _ in range(6):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                view = engine.view()
                batch = engine.commit(engine.plan(view), view)
                result = engine.execute(batch)
                torch.cuda.set_sync_debug_mode("default")
                engine.update(batch, result)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for i in range(4):
                engine.abort(str(i))


def test_memory_beside_the_cache_stays_within_the_profile():
    """A full run of the largest steps never takes more than the plan set aside, and not far less than the weights."""
    from research_engine.executors.memory_profile import measured_plan
    from research_engine.llm import load
    from research_engine.options import EngineOptions

    loaded = load(EngineOptions("dummy:smollm2-135m", device="cuda", skip_tokenizer_init=True), progress=False)
    plan = measured_plan(
        loaded.model, utilization=0.5, kv_bytes_per_token=loaded.config.kv_bytes_per_token * 2, block_size=16,
        max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048, graphs=[], token_graphs=[],
    )  # fmt: skip
    del loaded
    with tiny_smollm() as llm:
        torch.cuda.synchronize()
        cache = llm.engine.executor.kv_cache.nbytes
        torch.cuda.reset_peak_memory_stats()
        prompts = [[(i + j) % 40000 for j in range(1500)] for i in range(64)]
        llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=1), use_tqdm=False)
        beside = torch.cuda.max_memory_allocated() - cache
    expected = plan.weights + plan.activations
    assert 0.9 * expected < beside < 1.05 * expected, (beside, expected)


@contextmanager
def tiny_smollm() -> Iterator[LLM]:
    llm = LLM("dummy:smollm2-135m", device="cuda", skip_tokenizer_init=True, max_num_seqs=64, max_model_len=2048,
              max_num_batched_tokens=2048, gpu_memory_utilization=0.5, enforce_eager=True)  # fmt: skip
    try:
        yield llm
    finally:
        llm.shutdown()


def test_a_model_that_leaves_no_room_is_refused_with_numbers_and_remedies():
    with pytest.raises(OptionError, match=r"KV cache.*Try, in this order: \(1\) end other processes"):
        LLM("dummy:smollm2-135m", device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=0.001)
