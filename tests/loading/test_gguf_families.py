"""GGUF files of other families than Llama, named by llama.cpp's own table, give the logits of the original."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from research_engine.loading import load_config, load_model, resolve_model
from tests.loading.gguf_files import llama_cpp_permutation, write_gguf
from tests.models.paged_run import PagedRun
from tests.models.tiny_models import FAMILIES, make_model, prompts, reference_logits

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": FAMILIES["qwen2"],
    "qwen3": FAMILIES["qwen3"],
    "qwen3moe": FAMILIES["qwen3 moe"],
    "gemma2": ("Gemma2", {**FAMILIES["gemma2"][1], "query_pre_attn_scalar": 256}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 40, "sliding_window": 16, "query_pre_attn_scalar": 40, "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": FAMILIES["phi3"],
    "mixtral": FAMILIES["mixtral"],
}  # fmt: skip


def _converted(name: str, model: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and metadata as llama.cpp's converter writes them."""
    config, kind = model.config, "llama" if name == "mixtral" else name
    architecture = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == kind)
    table = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for stored, parameter in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = parameter.detach().float().numpy()
        if re.search(r"(norm|layernorm)\.weight$", stored) and kind.startswith("gemma"):
            weight = weight + 1
        if kind == "llama" and (match := re.search(r"\.([qk])_proj\.", stored)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            weight = llama_cpp_permutation(weight, heads)
        if stored.endswith("experts.gate_up_proj"):  # transformers' stack of both
            half = weight.shape[1] // 2
            layer = stored.split(".")[2]
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = weight[:, :half].copy()
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = weight[:, half:].copy()
        elif stored.endswith("experts.down_proj"):
            tensors[f"blk.{stored.split('.')[2]}.ffn_down_exps.weight"] = weight
        else:
            named = table.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert named is not None, stored
            tensors[named] = weight
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        metadata |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if rope["rope_type"] == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if kind in ("gemma2", "gemma3", "phi3"):
        metadata["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        metadata["attn_logit_softcapping"] = config.attn_logit_softcapping
        metadata["final_logit_softcapping"] = config.final_logit_softcapping
    if hasattr(config, "num_experts_per_tok"):
        metadata["expert_count"] = config.num_experts
        metadata["expert_used_count"] = config.num_experts_per_tok
        metadata["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return tensors, {f"{kind}.{key}": value for key, value in metadata.items()}


@pytest.mark.parametrize("name", _MODELS)
def test_a_converted_model_gives_the_logits_of_the_original(name: str, tmp_path: Path) -> None:
    original = make_model(_MODELS[name])
    tensors, metadata = _converted(name, original)
    kind = "llama" if name == "mixtral" else name
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata, architecture=kind)
    source = resolve_model(str(path))
    assert load_config(source).num_parameters == sum(p.numel() for p in original.parameters())
    model = load_model(source, dtype=torch.float32, device="cpu", progress=False)
    (ids,) = prompts([60])
    logits = PagedRun(model, 1, 64).step([ids])[0]
    torch.testing.assert_close(logits, reference_logits(original, ids), rtol=1e-4, atol=2e-4)


def test_factors_of_a_long_context_are_read_from_their_tensors(tmp_path: Path) -> None:
    original = make_model(FAMILIES["phi3"])
    tensors, metadata = _converted("phi3", original)
    factors = {kind: np.linspace(1, last, 8, dtype=np.float32) for kind, last in (("short", 2), ("long", 9))}
    tensors |= {f"rope_factors_{kind}.weight": values for kind, values in factors.items()}
    metadata |= {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.25}
    rope = load_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors, metadata, architecture="phi3")))).rope
    assert rope is not None and rope.scaling is not None
    assert (rope.scaling.kind, rope.scaling.original_max_position_embeddings) == ("longrope", 64)
    assert rope.scaling.attention_factor == 1.25
    assert rope.scaling.factors == tuple(factors["short"].tolist())
    assert rope.scaling.long_factors == tuple(factors["long"].tolist())
