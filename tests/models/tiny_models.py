"""Tiny random models of every family, as transformers makes and saves them: the reference for loading and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 197,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = {"rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **_ROPE}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE}
_FACTORS = {"short_factor": [1.0 + 0.02 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)]}
_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **_FACTORS, **_ROPE}
_GPT2 = {
    "vocab_size": 197, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_OPT = {
    "vocab_size": 197, "hidden_size": 64, "ffn_dim": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 80, "num_key_value_heads": 1}),
    "llama, llama3 rope, tied": (
        "Llama",
        {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32}, "tie_word_embeddings": True},
    ),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **_ROPE}}),
    "llama, yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama, yarn, not truncated": ("Llama", {"rope_parameters": {**_YARN, "truncate": False, "beta_fast": 16.0}}),
    "llama, biases, gelu": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 96, "num_key_value_heads": 4}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows in upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 112}),
    "qwen3, biases, window": (
        "Qwen3",
        {
            "head_dim": 32, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 256, "sliding_window": 16, "query_pre_attn_scalar": 100, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0, "num_hidden_layers": 4, "tie_word_embeddings": True,
        },
    ),
    "gemma2, untied, no caps": (
        "Gemma2",
        {"head_dim": 48, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 40, "sliding_window": 16, "query_pre_attn_scalar": 30, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 30}),
    "phi3, partial rope": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75, **_ROPE}},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2, untied, scaled by layer": (
        "GPT2",
        {**_GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100},
    ),
    "opt": ("OPT", _OPT),
    "opt, post-norm, projections": ("OPT", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt, untied, no final norm": ("OPT", {**_OPT, "tie_word_embeddings": False, "_remove_final_layer_norm": True}),
    "mixtral": ("Mixtral", {**_MOE, "num_local_experts": 4}),
    "mixtral, window": ("Mixtral", {**_MOE, "num_local_experts": 5, "sliding_window": 21, "num_experts_per_tok": 3}),
    "qwen3 moe": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 32},
    ),
    "qwen3 moe, a dense layer": (
        "Qwen3Moe",
        {
            **_MOE, "num_experts": 5, "moe_intermediate_size": 40, "num_hidden_layers": 3, "mlp_only_layers": [1],
            "head_dim": 16, "norm_topk_prob": False,
        },
    ),
}  # fmt: skip
"""By a name for people: transformers' prefix of the classes, and what differs from COMMON."""

LENGTH_DEPENDENT: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE}, "max_position_embeddings": 64},
    ),
}
"""Rotary scalings whose frequencies depend on the longest sequence; the original one is 64 in both."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            "logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
        },
    ),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
"""Decoders that run through transformers' own modules."""


def make_model(case: tuple[str, dict[str, Any]], seed: int = 0) -> Any:
    """A model in float32 whose norms and biases are random too, so that leaving one out shows."""
    prefix, changes = case
    own = prefix in ("GPT2", "OPT")
    config = getattr(transformers, f"{prefix}Config")(**({} if own else COMMON) | changes)
    name = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(prefix, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                around = 1.0 if "norm" in parameter_name or ".ln_" in parameter_name else 0.0
                parameter.copy_(torch.randn_like(parameter) * 0.2 + around * parameter_name.endswith("weight"))
            else:
                parameter.mul_(4)  # transformers starts at a spread of 0.02, at which attention is nearly uniform
    return model


def saved(model: Any, directory: Path) -> Path:
    """Write safetensors and config.json."""
    model.save_pretrained(directory)
    return directory


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of every position, ``[len(ids), V]``."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens, each by a forward pass over all that came before."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def prompts(lengths: list[int], vocab: int = 197, seed: int = 3) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
