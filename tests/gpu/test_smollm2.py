"""The real SmolLM2 on a GPU gives the greedy tokens that it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from research_engine import LLM, SamplingParams
from tests.conftest import cuda_reason
from tests.models.smollm2 import smollm2_source
from tests.test_greedy_parity import PROMPTS

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if reason := cuda_reason():
        pytest.skip(reason)
    smollm2_source()  # skips, saying so, where the weights cannot be had


@contextmanager
def smollm2(device: str, **options: object) -> Iterator[LLM]:
    llm = LLM(
        "smollm2-135m-instruct",
        device=device,
        max_model_len=256,
        check_integrity=True,
        **{"num_blocks": 200, **options},
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def greedy(device: str, **options: object) -> list[tuple[list[int], list[float]]]:
    """Per prompt: the tokens, and by how much each led over the second most probable."""
    with smollm2(device, **options) as llm:
        results = []
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            completion = output.outputs[0]
            assert completion.logprobs is not None
            leads = []
            for entry in completion.logprobs:
                best, second = sorted((value.logprob for value in entry.values()), reverse=True)[:2]
                leads.append(best - second)
            results.append((list(completion.token_ids), leads))
        return results


@pytest.fixture(scope="module")
def on_cpu() -> list[tuple[list[int], list[float]]]:
    return greedy("cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=512)


@pytest.mark.parametrize("budget", [48, 2048])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_float32_tokens_equal_the_cpus(
    on_cpu: list[tuple[list[int], list[float]]], budget: int, preemption: str
) -> None:
    few_blocks = {"num_blocks": 40, "swap_space": 0.5} if preemption == "swap" else {}
    options = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "scheduler_params": {"preemption": preemption}}
    on_gpu = greedy("cuda", dtype="float32", **{**options, **few_blocks})
    assert [tokens for tokens, _ in on_gpu] == [tokens for tokens, _ in on_cpu]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_tokens_differ_from_the_cpus_only_at_near_ties(
    on_cpu: list[tuple[list[int], list[float]]], dtype: str
) -> None:
    on_gpu = greedy("cuda", dtype=dtype, max_num_seqs=8, max_num_batched_tokens=512)
    limit = {"bfloat16": 0.35, "float16": 0.05}[dtype]  # some 40 times the type's rounding of a logit of 8
    for (expected, leads), (tokens, _) in zip(on_cpu, on_gpu, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), None)
        assert at is None or leads[at] < limit, f"token {at} differs although the CPU's choice led by {leads[at]:.3f}"
    assert sum(tokens == expected for (expected, _), (tokens, _) in zip(on_cpu, on_gpu, strict=True)) >= 10


def test_the_capital_of_france(on_cpu: list[tuple[list[int], list[float]]]) -> None:
    with smollm2("cuda", dtype="float16") as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
        assert "Paris" in answer
    del on_cpu
    torch.cuda.empty_cache()
