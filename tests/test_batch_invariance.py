"""With batch_invariant a request's tokens and log-probabilities are the same bits, however the work is cut."""

from __future__ import annotations

import dataclasses

import pytest

import schedulers
from research_engine import LLM, SamplingParams
from research_engine.llm import load
from research_engine.models.decoder import Decoder
from research_engine.options import EngineOptions, OptionError
from tests.models.tiny_models import FAMILIES, make_model, saved

PROMPTS = [[(7 * i + 3 * j) % 190 for j in range(5 + 13 * i % 61)] for i in range(9)]
PROMPTS[3] = PROMPTS[2] + [1, 2, 3]
PARAMS = [
    SamplingParams(temperature=0.9 if i % 2 else 0.0, seed=i, max_tokens=6 + 5 * i % 17, ignore_eos=True, logprobs=3)
    for i in range(9)
]


def bits(model: str, **options) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Per prompt: tokens, and every log-probability as it came."""
    defaults = {"device": "cpu", "num_blocks": 200, "block_size": 8, "max_model_len": 128, "batch_invariant": True,
                "skip_tokenizer_init": True, "check_integrity": True}  # fmt: skip
    llm = LLM(model, **{**defaults, **options})
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (list(c.token_ids), [{token: value.logprob for token, value in entry.items()} for entry in c.logprobs])
        for c in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="module")
def undisturbed():
    return bits("dummy:tiny", scheduler="fcfs", max_num_seqs=1, enable_prefix_caching=False)


@pytest.mark.parametrize("policy", schedulers.available())
def test_every_policy_gives_the_same_bits(policy, undisturbed):
    """With chunks of 11 tokens and blocks so scarce that requests are preempted."""
    assert bits("dummy:tiny", scheduler=policy, max_num_batched_tokens=11, num_blocks=20, max_num_seqs=5) == undisturbed


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1},
        {"block_size": 1, "num_blocks": 1000},
        {"block_size": 32},
        {"max_num_seqs": 9, "max_num_batched_tokens": 512, "overlap": True},
        {"num_blocks": 20, "num_host_blocks": 100, "scheduler_params": {"preemption": "swap"}},
    ],
    ids=str,
)
def test_sizes_overlap_and_swapping_give_the_same_bits(options, undisturbed):
    assert bits("dummy:tiny", **options) == undisturbed


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2"])
def test_windows_experts_and_other_norms_give_the_same_bits(family, tmp_path):
    directory = str(saved(make_model(FAMILIES[family]), tmp_path))
    alone = bits(directory, max_num_seqs=1, enable_prefix_caching=False)
    assert bits(directory, max_num_batched_tokens=7, max_num_seqs=6) == alone
    assert bits(directory, max_num_batched_tokens=64, num_blocks=20) == alone


def test_bfloat16_gives_the_same_bits():
    alone = bits("dummy:tiny", dtype="bfloat16", max_num_seqs=1, enable_prefix_caching=False)
    assert bits("dummy:tiny", dtype="bfloat16", max_num_batched_tokens=9) == alone


def test_it_is_off_unless_asked_for():
    options = EngineOptions("dummy:tiny", device="cpu")
    assert not options.batch_invariant
    model = load(options, progress=False).model
    assert isinstance(model, Decoder)
    assert model.lm_head.rows_at_once is None and model.layers[0].attention.invariant is None
    model = load(dataclasses.replace(options, batch_invariant=True), progress=False).model
    assert model.lm_head.rows_at_once == 32 and model.layers[0].attention.invariant == {"path": "prefill"}


def test_an_option_of_the_wrong_kind_is_refused():
    with pytest.raises(OptionError, match="batch_invariant = 1: must be True or False"):
        EngineOptions("dummy:tiny", batch_invariant=1)
