"""Sampling parameters and engine limits refuse what makes no sense, by field, value and range."""

from __future__ import annotations

import math

import pytest

from research_engine.engine.config import EngineConfig
from research_engine.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("n", [0, -1, 129, 1.0, True], [1, 128]),
        ("temperature", [-0.1, math.nan, math.inf, "1", True], [0, 0.0, 2.5]),
        ("top_k", [-2, 1.5], [-1, 0, 40]),
        ("top_p", [0, 0.0, 1.1, math.nan], [1e-6, 1, 0.9]),
        ("min_p", [-0.1, 1.1], [0, 1, 0.05]),
        ("repetition_penalty", [0, -1.0, math.inf], [0.1, 1, 2.0]),
        ("presence_penalty", [-2.1, 2.1], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1], [-2, 2]),
        ("seed", [1.5, "x", True], [None, -3, 2**70]),
        ("min_tokens", [-1, 0.5], [0, 16]),
        ("max_tokens", [0, -1, 1.5], [None, 1, 10**6]),
        ("logprobs", [-1, 0.5], [None, 0, 20]),
        ("prompt_logprobs", [-1], [None, 0]),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name_and_value(field, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=rf"{field} = "):
            SamplingParams(**{field: value})
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5 is more than max_tokens = 4"),
        ({"stop": ""}, "not empty"),
        ({"stop": ["a", 3]}, "stop holds 3"),
        ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a'"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] = 101.0"),
        ({"logit_bias": {-3: 1.0}}, r"logit_bias\[-3\]"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] = nan"),
        ({"logit_bias": {1.7: 1.0}}, "token ids"),
        ({"logit_bias": [1]}, "token ids"),
        ({"stop": 5}, "lists"),
        ({"stop_token_ids": 5}, "lists"),
        ({"ignore_eos": "no"}, "ignore_eos = 'no': must be True or False"),
    ],
)
def test_parameters_that_contradict_each_other_or_hold_odd_values_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**parameters)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_continuation_has_its_own_seed_and_is_one():
    own = SamplingParams(n=4, top_k=5, stop="x").for_continuation(2, seed=10)
    assert (own.n, own.seed, own.top_k, own.stop) == (1, 12, 5, ("x",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0), ("num_blocks", 1.5), ("block_size", 0), ("num_host_blocks", -1), ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0), ("max_model_len", 1), ("vocab_size", -1), ("stall_limit", 0),
        ("num_blocks", True),
    ],
)  # fmt: skip
def test_an_engine_limit_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=rf"{field} = {value!r}: must be an integer >= "):
        EngineConfig(**{"num_blocks": 4, field: value})
