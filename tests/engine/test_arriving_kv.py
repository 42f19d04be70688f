"""Requests whose prompt was computed elsewhere: they start where their KV ends, and are ordinary ones from then on."""

from __future__ import annotations

import pytest

import schedulers
from research_engine.engine.engine import Engine
from research_engine.engine.errors import RequestError
from research_engine.engine.sampling_params import SamplingParams
from tests.engine.shadow import alone, drain, make_engine

PROMPT = list(range(10, 33))  # 23 tokens: five blocks of 4 and a part of one


def make(num_blocks: int = 40, **sizes) -> Engine:
    return make_engine(schedulers.create("chunked_prefill"), num_blocks=num_blocks, **sizes)


@pytest.mark.parametrize("computed", [1, 8, 20, 22])
def test_only_what_did_not_come_is_computed(computed):
    engine = make()
    (request,) = engine.add_request("a", PROMPT, SamplingParams(max_tokens=6, seed=3), computed_tokens=computed)
    drain(engine)
    first = engine.records.steps[0]
    assert (first.starts, first.num_tokens) == ([computed], [len(PROMPT) - computed])
    assert (request.output_token_ids, request.finish_reason) == alone(PROMPT, seed=3, max_tokens=6)
    assert (request.num_cached_tokens, request.num_recomputed_tokens) == (0, 0)


def test_its_blocks_are_found_by_others_once_it_ran():
    engine = make()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2), computed_tokens=22)
    drain(engine)
    (later,) = engine.add_request("b", PROMPT, SamplingParams(max_tokens=2))
    drain(engine)
    assert later.num_cached_tokens == 20


def test_a_cached_prefix_does_not_stand_in_for_the_kv_that_came():
    engine = make()
    for name, computed in (("a", 0), ("b", 22)):
        (request,) = engine.add_request(name, PROMPT, SamplingParams(max_tokens=2, seed=1), computed_tokens=computed)
        drain(engine)
    assert engine.executor.batches[-2].received == [(request, 22)]
    assert engine.kv_cache.num_used_blocks == 0


def test_it_waits_for_blocks_like_any_other():
    engine = make(num_blocks=8)
    engine.add_request("long", range(20, 48), SamplingParams(max_tokens=3, seed=1))  # 7 blocks, then 8
    engine.step()
    (request,) = engine.add_request("a", PROMPT, SamplingParams(max_tokens=2, seed=2), computed_tokens=22)
    engine.step()
    assert not request.is_running
    drain(engine)
    assert request.output_token_ids == alone(PROMPT, seed=2, max_tokens=2)[0]


def test_after_a_preemption_its_prompt_is_computed_here():
    engine = make(num_blocks=14, enable_prefix_caching=False)
    requests = [
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=20, seed=seed), computed_tokens=22)[0]
        for seed, name in enumerate("ab")
    ]
    drain(engine)
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_recomputed_tokens for request in requests) > 0
    for seed, request in enumerate(requests):
        assert request.output_token_ids == alone(PROMPT, seed=seed, max_tokens=20)[0]


@pytest.mark.parametrize(
    ("computed", "sampling", "rule"),
    [(23, {}, "computed_tokens = 23 of 23 prompt tokens"),
     (-1, {}, "computed_tokens = -1"),
     (5, {"n": 2}, "with n > 1 or prompt_logprobs"),
     (5, {"prompt_logprobs": 1}, "with n > 1 or prompt_logprobs")],
)  # fmt: skip
def test_what_cannot_come_is_refused(computed, sampling, rule):
    with pytest.raises(RequestError, match=rule):
        make().add_request("a", PROMPT, SamplingParams(**sampling), computed_tokens=computed)


def test_the_torch_executor_says_that_it_takes_in_no_kv():
    pytest.importorskip("torch")
    from research_engine import LLM

    engine = LLM("dummy:tiny", device="cpu", num_blocks=8, skip_tokenizer_init=True).engine
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=2), computed_tokens=5)
    with pytest.raises(ValueError, match="'a': computed_tokens: this executor takes in no KV"):
        engine.step()
