"""Logits and greedy tokens of our Llama against transformers', on tiny random models and on the real SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from research_engine.loading import LoadError, load_model, load_tokenizer, resolve_model
from tests.models.paged_run import PagedRun
from tests.models.smollm2 import smollm2_reference, smollm2_source
from tests.models.tiny_llama import make_reference, saved

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head size other than hidden / heads": {"head_dim": 64},
    "llama3 rope": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def prompts(lengths: list[int], vocab: int = 199, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_on_every_position(variant: str, tmp_path: Path) -> None:
    reference = make_reference(**VARIANTS[variant])
    source = resolve_model(str(saved(reference, tmp_path)))
    model = load_model(source, dtype=torch.float32, device="cpu", progress=False)
    ids = prompts([1, 150, 17])
    for given, logits in zip(ids, PagedRun(model, 3, 160).step(ids), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, given), rtol=1e-4, atol=1e-4)


def test_logits_do_not_depend_on_how_a_prompt_is_cut_or_who_shares_the_step(tmp_path: Path) -> None:
    reference = make_reference()
    model = load_model(
        resolve_model(str(saved(reference, tmp_path))), dtype=torch.float32, device="cpu", progress=False
    )
    long, short = prompts([70, 9])
    run = PagedRun(model, 2, 96, block_size=8)
    rows: list[list[torch.Tensor]] = [[], []]
    for step in ([long[:33], []], [long[33:34], short[:8]], [long[34:], short[8:]]):
        for r, logits in enumerate(run.step(step)):
            rows[r] += [logits] if step[r] else []
    for given, parts in zip((long, short), rows, strict=True):
        torch.testing.assert_close(torch.cat(parts), reference_logits(reference, given), rtol=1e-4, atol=1e-4)


def test_a_sharded_checkpoint_gives_the_model_of_a_single_file(tmp_path: Path) -> None:
    reference = make_reference()
    directory = saved(reference, tmp_path, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    model = load_model(resolve_model(str(directory)), dtype=torch.float32, device="cpu", progress=False)
    (ids,) = prompts([40])
    torch.testing.assert_close(
        PagedRun(model, 1, 64).step([ids])[0], reference_logits(reference, ids), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    reference = make_reference()
    model = load_model(
        resolve_model(str(saved(reference, tmp_path))), dtype=torch.bfloat16, device="cpu", progress=False
    )
    (ids,) = prompts([60])
    expected = reference_logits(reference, ids)
    logits = PagedRun(model, 1, 64).step([ids])[0]
    assert logits.dtype == torch.float32
    error = (logits - expected).norm() / expected.norm()
    assert error < 8 * torch.finfo(torch.bfloat16).eps, f"relative error {error}"


def test_float16_on_the_cpu_is_refused() -> None:
    with pytest.raises(LoadError, match="float16 has no CPU kernels; use float32 or bfloat16"):
        load_model(resolve_model("dummy:tiny"), dtype=torch.float16, device="cpu", progress=False)


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    reference = make_reference()
    model = load_model(
        resolve_model(str(saved(reference, tmp_path))), dtype=torch.float32, device="cpu", progress=False
    )
    ids = prompts([5, 31, 16])
    for given, tokens in zip(ids, PagedRun(model, 3, 64).greedy(ids, 24), strict=True):
        with torch.inference_mode():
            wanted = reference.generate(torch.tensor([given]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert tokens == wanted[0, len(given) :].tolist()


def test_weights_on_the_cpu_are_packed_and_no_rows_give_no_logits() -> None:
    model = load_model(resolve_model("dummy:tiny"), dtype=torch.float32, device="cpu", progress=False)
    packed = torch.backends.mkldnn.is_available()
    assert (model.layers[0].attention.qkv.weight is None) == packed
    assert model.compute_logits(torch.empty(0, 128)).shape == (0, 259)


@pytest.mark.network
def test_smollm2_logits_equal_transformers_own_reading_of_the_file() -> None:
    source, reference = smollm2_source(), smollm2_reference()
    model, tokenizer = load_model(source, dtype=torch.float32, device="cpu", progress=False), load_tokenizer(source)
    texts = [
        "The capital of France is",
        "def f(n):\n    return",
        "In 2024, 12345 cats " + "walked over the hill and " * 40,
    ]
    ids = [tokenizer.encode(text) for text in texts]
    run = PagedRun(model, 3, 300)
    for given, logits in zip(ids, run.step(ids), strict=True):
        expected = reference_logits(reference, given)  # of magnitude 35: noise is some 1e-4
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    (tokens,) = PagedRun(model, 1, 64).greedy([ids[0]], 24)
    with torch.inference_mode():
        wanted = reference.generate(torch.tensor([ids[0]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert tokens == wanted[0, len(ids[0]) :].tolist()
