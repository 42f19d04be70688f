"""The torch executor: what a batch asks for and nothing else, whatever the unused slots hold."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from research_engine import SamplingParams
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, Executor
from research_engine.engine.engine import Engine
from research_engine.executors.kv_sizing import free_host_memory, kv_bytes_per_block
from research_engine.executors.torch_executor import TorchExecutor
from research_engine.llm import LoadedModel, build_engine, load
from research_engine.options import EngineOptions


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(EngineOptions("dummy:tiny", device="cpu"), progress=False)


def make_engine(loaded: LoadedModel, **options) -> Engine:
    options = {"num_blocks": 40, "block_size": 8, "max_model_len": 200, "check_integrity": True, **options}
    return build_engine(EngineOptions("dummy:tiny", **options), loaded)


def make_executor(loaded: LoadedModel, **sizes) -> TorchExecutor:
    return TorchExecutor(loaded.model, EngineConfig(**{"max_num_seqs": 4, "max_model_len": 64, **sizes}))


def run(engine: Engine, prompts, **params) -> list[list[int]]:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params})
    requests = [engine.add_request(str(i), prompt, sampling)[0] for i, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    return [request.output_token_ids for request in requests]


def test_after_shutdown_nothing_holds_the_cache_though_the_engine_lives_on(loaded):
    """A second engine on the same model finds the memory that the first one had."""
    engine = make_engine(loaded, overlap=True)
    run(engine, [[1, 2, 3]])
    cache = weakref.ref(engine.executor.kv_cache)
    engine.executor.shutdown()
    gc.collect()
    assert cache() is None
    assert engine.executor.kv_cache.nbytes == 0


def test_it_is_an_executor(loaded):
    assert isinstance(make_executor(loaded, num_blocks=2, block_size=4), Executor)


def test_the_cache_has_the_layout_dtype_and_size_that_were_promised(loaded):
    executor = make_executor(loaded, num_blocks=7, block_size=4, num_host_blocks=3)
    assert executor.kv_cache.shape == (2, 2, 7, 2, 4, 32)
    assert executor.host_cache.shape == (2, 2, 3, 2, 4, 32)
    assert executor.kv_cache.dtype == loaded.model.dtype
    assert executor.kv_cache.nbytes == 7 * kv_bytes_per_block(loaded.config, 4, loaded.model.dtype)


@pytest.mark.parametrize("overlap", [False, True])
def test_padding_a_step_with_prompts_changes_no_token(loaded, overlap):
    prompts = [[(7 * i + j) % 250 for j in range(3 + 17 * i % 60)] for i in range(9)]
    options = {"num_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 5, "overlap": overlap}
    expected = run(make_engine(loaded, **options), prompts, temperature=0.8, seed=3)
    engine = make_engine(loaded, **options)
    executor, sizes = engine.executor, []
    executor._most_padded = 64  # what graphs of a GPU are captured for
    executor._token_graphs.padded = lambda size: sizes.append(size) or -(-size // 16) * 16
    assert run(engine, prompts, temperature=0.8, seed=3) == expected
    assert any(size % 16 for size in sizes) and max(sizes) <= 64


def test_prompt_log_probabilities_are_computed_by_steps_that_are_not_padded(loaded):
    engine = make_engine(loaded, max_num_batched_tokens=64)
    engine.executor._most_padded = 64
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    request = engine.add_request("asks", [1, 2, 3, 4], sampling)[0]
    while engine.has_unfinished:
        engine.step()
    assert len(request.prompt_logprobs) == 3


def test_what_unused_slots_hold_has_no_effect(loaded):
    prompts = [[5] * 3, list(range(60)), list(range(100, 117))]
    clean, dirty = make_engine(loaded), make_engine(loaded)
    clean.executor.kv_cache.zero_()
    dirty.executor.kv_cache.fill_(float("nan"))
    assert run(clean, prompts) == run(dirty, prompts)


def test_rows_that_end_before_the_last_token_draw_none(loaded):
    engine = make_engine(loaded, max_num_batched_tokens=8)
    engine.add_request("long", range(20), SamplingParams(temperature=0))
    drawn = []
    for _ in range(3):
        view = engine.view()
        batch = engine.commit(engine.plan(view), view)
        result = engine.execute(batch)
        drawn.append(result.wait().token_ids[0] >= 0)
        engine.update(batch, result)
    assert drawn == [False, False, True]


def test_a_request_is_not_changed_by_being_computed(loaded):
    engine = make_engine(loaded)
    sampling = SamplingParams(logprobs=2, prompt_logprobs=1, repetition_penalty=1.2, seed=1)
    request = engine.add_request("asked", range(30), sampling)[0]
    view = engine.view()
    batch = engine.commit(engine.plan(view), view)

    def state() -> dict[str, object]:
        return copy.deepcopy({name: getattr(request, name) for name in request.__slots__ if name != "_text"})

    before = state()
    engine.execute(batch)
    assert state() == before


def test_blocks_move_out_then_in_then_are_copied(loaded):
    executor = make_executor(loaded, num_blocks=4, block_size=2, num_host_blocks=2)
    for block in range(4):
        executor.kv_cache[:, :, block] = block
    executor.host_cache[:, :, 0] = 10.0
    batch = Batch(step=0, rows=[], num_tokens=0, swap_out=[(1, 1)], swap_in=[(0, 1)], copies=[(1, 2)])
    assert list(executor.execute(batch).wait().token_ids) == []
    assert [float(executor.kv_cache[0, 0, block].mean()) for block in range(4)] == [0.0, 10.0, 10.0, 3.0]
    assert float(executor.host_cache[1, 1, 1].mean()) == 1.0


def test_a_reused_id_starts_from_its_own_blocks(loaded):
    engine = make_engine(loaded, enable_prefix_caching=False)
    first, second = [list(range(40))], [list(range(80, 120))]
    expected = run(make_engine(loaded), second)
    run(engine, first)
    assert run(engine, second) == expected


def test_bfloat16_runs_with_half_the_cache():
    half = load(EngineOptions("dummy:tiny", device="cpu", dtype="bfloat16"), progress=False)
    engine = make_engine(half)
    assert engine.executor.kv_cache.dtype == torch.bfloat16
    assert len(run(engine, [list(range(30))])[0]) == 12


def test_free_memory_is_more_than_nothing_and_less_than_a_pebibyte():
    assert 2**20 < free_host_memory() < 2**50
