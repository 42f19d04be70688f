"""Every family against transformers: logits at every position, chunked and paged, and the engine's greedy tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from research_engine import LLM, SamplingParams
from research_engine.loading import load_config, load_model, resolve_model
from research_engine.models import families
from research_engine.models.fallback import FallbackWarning, TransformersDecoder
from research_engine.models.hf_config import _READERS
from tests.models.paged_run import PagedRun
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

NOISE = {"rtol": 1e-4, "atol": 2e-4}


def load(directory: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    return load_model(resolve_model(str(directory)), **options)


def chunked_logits(model: Any, long: list[int], short: list[int]) -> list[torch.Tensor]:
    """Logits of two requests whose prompts are cut into chunks, some of one token, in steps that they share."""
    run = PagedRun(model, 2, len(long) + 8, block_size=8)
    rows: list[list[torch.Tensor]] = [[], []]
    cut = len(long) - 40
    steps = [(long[:cut], []), (long[cut : cut + 1], short[:5]), (long[cut + 1 : -3], short[5:])]
    steps += [([token], []) for token in long[-3:]]
    for step in steps:
        for r, logits in enumerate(run.step(step)):
            rows[r] += [logits] if step[r] else []
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_engine_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family])
    directory = saved(reference, tmp_path)
    long, short = prompts([150, 21])
    for given, logits in zip((long, short), chunked_logits(load(directory), long, short), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, given), **NOISE)
    llm = LLM(str(directory), skip_tokenizer_init=True, num_blocks=40, max_num_batched_tokens=32, max_num_seqs=4)
    given = prompts([1, 33, 50], seed=9)
    out = llm.generate(
        [{"prompt_token_ids": ids} for ids in given],
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        use_tqdm=False,
    )
    assert [o.outputs[0].token_ids for o in out] == [greedy(reference, ids, 6) for ids in given]


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
@pytest.mark.parametrize("longest", [64, 200])
def test_scalings_by_length_are_those_of_the_longest_sequence_served(family: str, longest: int, tmp_path: Path) -> None:
    reference = make_model(LENGTH_DEPENDENT[family])
    model = load(saved(reference, tmp_path), max_model_len=longest)
    long, short = prompts([longest, 21])
    logits = chunked_logits(model, long, short)
    torch.testing.assert_close(logits[0], reference_logits(copy.deepcopy(reference), long), **NOISE)
    if longest == 64:  # nothing is scaled: a short sequence is the reference's, too
        torch.testing.assert_close(logits[1], reference_logits(reference, short), **NOISE)


@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders_run_through_transformers_with_paged_attention(family: str, tmp_path: Path) -> None:
    reference = make_model(OTHERS[family])
    with pytest.warns(FallbackWarning, match=f"{type(reference).__name__} has no definition .* transformers' modules"):
        model = load(saved(reference, tmp_path))
    assert isinstance(model, TransformersDecoder)
    long, short = prompts([100, 21])
    for given, logits in zip((long, short), chunked_logits(model, long, short), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, given), **NOISE)
    assert model.compute_logits(torch.empty(0, 64)).shape == (0, 197)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_counts_them(family: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family])
    reference.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    counted = sum(p.numel() for p in reference.parameters())
    config = tmp_path / "config.json"
    text = config.read_text()
    if '"architectures": null' in text or "architectures" not in text:
        config.write_text(text.replace("{", f'{{"architectures": ["{type(reference).__name__}"],', 1))
    assert load_config(resolve_model(str(tmp_path))).num_parameters == counted


def test_every_family_has_names_and_a_reader() -> None:
    assert set(families.FAMILIES) == set(_READERS)
