"""The same weights under the names of other checkpoints: bare models, buffers, multimodal ones, experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from research_engine.loading import LoadError, load_model, resolve_model
from tests.models.paged_run import PagedRun
from tests.models.tiny_models import FAMILIES, make_model, prompts, reference_logits, saved

Tensors = dict[str, torch.Tensor]
(IDS,) = prompts([50])


def logits_of(directory: Path) -> torch.Tensor:
    model = load_model(resolve_model(str(directory)), dtype=torch.float32, device="cpu", progress=False)
    return PagedRun(model, 1, 64).step([IDS])[0]


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def strip(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "prefix"), [("qwen2", "model."), ("gpt2", "transformer."), ("opt", "model."), ("gemma3", "model.")]
)
def test_a_bare_models_names_lack_the_prefix(family: str, prefix: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family])
    rewrite(saved(reference, tmp_path), strip(prefix))
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, IDS), rtol=1e-4, atol=2e-4)


def test_gpt2s_stored_masks_are_passed_over(tmp_path: Path) -> None:
    """As in the checkpoint that OpenAI's weights were first converted to."""
    reference = make_model(FAMILIES["gpt2"])
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256).tril() for i in range(3)}
    rewrite(saved(reference, tmp_path), lambda tensors: {**strip("transformer.")(tensors), **masks})
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, IDS), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma_runs_alone(prefix: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES["gemma3"])
    saved(reference, tmp_path)
    image = {"vision_tower.embeddings.weight": torch.ones(3), "multi_modal_projector.norm.weight": torch.ones(2)}
    rewrite(tmp_path, lambda tensors: {prefix + n.removeprefix("model."): t for n, t in tensors.items()} | image)
    text = json.loads((tmp_path / "config.json").read_text())
    text.pop("architectures")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, IDS), rtol=1e-4, atol=2e-4)


def test_the_same_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    saved(make_model(FAMILIES["qwen2"]), tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"].clone()})
    with pytest.raises(LoadError, match=r"'norm\.weight' and tensor 'model\.norm\.weight' are the same weight"):
        logits_of(tmp_path)


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def cut(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t[:-1] if n == name else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("phi3", drop("model.layers.1.self_attn.qkv_proj.weight"), "missing tensor .*1.self_attn.qkv_proj.weight"),
        (
            "gpt2",
            cut("transformer.h.0.attn.c_attn.weight"),
            r"shape \[95, 288\], the configuration asks for \[96, 288\]",
        ),
        ("opt", drop("model.decoder.layers.0.fc1.bias"), "missing tensor model.decoder.layers.0.fc1.bias"),
        (
            "mixtral",
            drop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
            "missing tensor model.layers.0.block_sparse_moe.experts.3.w2.weight",
        ),
        ("qwen3", cut("model.layers.2.self_attn.q_norm.weight"), r"shape \[111\], .* \[112\]"),
        (
            "gemma2",
            lambda tensors: {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(256)},
            "unexpected tensor model.layers.0.self_attn.q_norm.weight",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    family: str, change: Callable[[Tensors], Tensors], named: str, tmp_path: Path
) -> None:
    rewrite(saved(make_model(FAMILIES[family]), tmp_path), change)
    with pytest.raises(LoadError, match=named):
        logits_of(tmp_path)


def make_other(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.filterwarnings("ignore::research_engine.models.fallback.FallbackWarning")
@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}, "max_position_embeddings|attention interface"),
        (
            "DeepseekV2",
            {
                "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
                "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2, "intermediate_size": 32,
                "max_position_embeddings": 64, "n_shared_experts": 1, "moe_intermediate_size": 16,
                "num_attention_heads": 4,
            },
            "DeepseekV2ForCausalLM has keys of .* the cache needs|cannot be run over a paged cache",
        ),
        ("Mamba", {}, "MambaConfig gives no integer 'num_attention_heads', got None"),
    ],
)  # fmt: skip
def test_a_decoder_whose_attention_cannot_be_paged_says_why(
    name: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    saved(make_other(name, **options), tmp_path)
    with pytest.raises(LoadError, match=named):
        logits_of(tmp_path)
