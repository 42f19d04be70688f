"""Every family on a GPU against transformers: float32 gives the CPU's tokens, bfloat16 is off by rounding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from research_engine import LLM, SamplingParams
from research_engine.loading import load_model, resolve_model
from tests.gpu.rounding import Twins, assert_engine_within_rounding, assert_no_worse, position_errors
from tests.models.test_families import NOISE, chunked_logits
from tests.models.tiny_models import (
    FAMILIES,
    LENGTH_DEPENDENT,
    OTHERS,
    greedy,
    make_model,
    prompts,
    reference_logits,
    saved,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::research_engine.models.fallback.FallbackWarning"),
]
CASES = FAMILIES | OTHERS
EXPERTS = {name for name in CASES if "moe" in name or "mixtral" in name}


def load(directory: Path, device: str, dtype: torch.dtype, **options: Any) -> Any:
    return load_model(resolve_model(str(directory)), dtype=dtype, device=device, progress=False, **options)


def engine(directory: Path, device: str, dtype: str, **options: Any) -> LLM:
    """Prompts are cut into chunks, decode steps and small steps with prompts are graphs."""
    return LLM(
        str(directory), skip_tokenizer_init=True, device=device, dtype=dtype, num_blocks=60, max_num_batched_tokens=64,
        max_num_seqs=4, max_model_len=256, check_integrity=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_float32_logits_and_engine_tokens_are_those_of_the_cpu(gpu: str, family: str, tmp_path: Path) -> None:
    reference = make_model(CASES[family])
    directory = saved(reference, tmp_path)
    long, short = prompts([150, 21])
    model = load(directory, gpu, torch.float32)
    for given, logits in zip((long, short), chunked_logits(model, long, short), strict=True):
        torch.testing.assert_close(logits.float().cpu(), reference_logits(reference, given), **NOISE)
    del model
    llm = engine(directory, gpu, "float32")
    given = prompts([1, 33, 50, 90], seed=9)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    llm.shutdown()
    assert [list(o.outputs[0].token_ids) for o in out] == [greedy(reference, ids, 6) for ids in given]


@pytest.mark.parametrize("family", CASES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(gpu: str, family: str, tmp_path: Path) -> None:
    twins = Twins(make_model(CASES[family]), torch.bfloat16, gpu)
    directory = saved(twins.exact, tmp_path)
    quantile = 0.75 if family in EXPERTS else 1.0
    long, short = prompts([150, 21])
    ours, theirs = [], []
    for given, logits in zip(
        (long, short), chunked_logits(load(directory, gpu, torch.bfloat16), long, short), strict=True
    ):
        exact, rounded = twins.logits(given)
        ours.append(position_errors(logits, exact))
        theirs.append(position_errors(rounded, exact))
    assert_no_worse(torch.cat(ours), torch.cat(theirs), quantile=quantile)
    llm = engine(directory, gpu, "bfloat16")
    assert_engine_within_rounding(llm, twins, quantile=quantile)
    llm.shutdown()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "qwen3 moe"])
def test_float16_is_as_near_to_float32_as_transformers_is(gpu: str, family: str, tmp_path: Path) -> None:
    if gpu == "cpu":
        pytest.skip("float16 has no CPU kernels")
    twins = Twins(make_model(CASES[family]), torch.float16, gpu)
    llm = engine(saved(twins.exact, tmp_path), gpu, "float16")
    assert_engine_within_rounding(llm, twins, quantile=0.75 if family in EXPERTS else 1.0)
    llm.shutdown()


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_scalings_by_length_are_those_of_the_longest_sequence_served(gpu: str, family: str, tmp_path: Path) -> None:
    reference = make_model(LENGTH_DEPENDENT[family])
    model = load(saved(reference, tmp_path), gpu, torch.float32, max_model_len=200)
    long, short = prompts([200, 21])
    logits = chunked_logits(model, long, short)[0]
    torch.testing.assert_close(logits.float().cpu(), reference_logits(reference, long), **NOISE)
