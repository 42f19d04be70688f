"""Dummy weights: reproducible from the seed alone, and of a size that keeps activations alive."""

from __future__ import annotations

import pytest
import torch

from research_engine.loading import LoadError, load_config, load_model, load_tokenizer, resolve_model
from research_engine.loading.dummy import DUMMY_MODELS, DummyCheckpoint
from tests.models.paged_run import PagedRun


def read(name: str, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    checkpoint = DummyCheckpoint("dummy:tiny", DUMMY_MODELS["dummy:tiny"].config, seed)
    return checkpoint.read(name, torch.device(device))


def test_weights_follow_from_seed_and_name() -> None:
    q, up = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(read(q), read(q))
    assert not torch.equal(read(q), read(q, seed=1))
    assert not torch.equal(read(q), read(q.replace("0", "1")))
    assert read(up).unique().numel() > 0.99 * read(up).numel()


def test_weights_are_the_same_on_every_device(device: str) -> None:
    name = "lm_head.weight"
    assert torch.equal(read(name, device=device).cpu(), read(name))


def test_rows_are_uncorrelated_and_of_unit_gain() -> None:
    weight = read("model.layers.1.mlp.gate_proj.weight")  # [256, 128]
    torch.testing.assert_close(weight.var() * 128, torch.tensor(1.0), rtol=0.03, atol=0)
    assert abs(weight.mean() * 128**0.5) < 0.02
    off_diagonal = torch.corrcoef(weight) - torch.eye(256)
    assert off_diagonal.abs().mean() < 0.09  # 128 independent draws give 0.07


def test_the_tiny_model_answers_different_prompts_differently() -> None:
    source = resolve_model("dummy:tiny")
    model, tokenizer = load_model(source, dtype=torch.float32, device="cpu", progress=False), load_tokenizer(source)
    prompts = [tokenizer.encode(text) for text in ("Hello", "world", "paged attention")]
    answers = PagedRun(model, 3, 48).greedy(prompts, 16)
    assert len(set(map(tuple, answers))) == 3
    assert all(len(set(answer)) > 4 for answer in answers)  # no constant echo


def test_shapes_of_real_models_come_without_a_tokenizer() -> None:
    source = resolve_model("dummy:llama3-8b")
    assert load_config(source).num_layers == 32
    with pytest.raises(LoadError, match=r"dummy:llama3-8b has no tokenizer: .*skip_tokenizer_init"):
        load_tokenizer(source)
