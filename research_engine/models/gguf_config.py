"""Reads the metadata of a GGUF file: llama.cpp's keys for the families that it and this project both have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from research_engine.models.config import ModelConfig
from research_engine.models.errors import ConfigError
from research_engine.models.hf_config import head_dim_of
from research_engine.models.reading import need, take
from research_engine.models.rope import Rope, RopeScaling

Keys = Callable[..., Any]  # (key without the architecture, type[, default]) -> value


def config_from_gguf(
    metadata: Mapping[str, Any], *, tied: bool, rope_factors: Mapping[str, tuple[float, ...]]
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        tied: whether the file has no ``output.weight``.
        rope_factors: divisors of the rotary frequencies that the file holds as tensors: ``"freqs"``, or ``"short"`` and
            ``"long"``.

    Raises:
        ConfigError: a key is missing, or its value is one this project does not implement.
    """
    kind = need(metadata, "general.architecture", str)
    if kind not in _FAMILIES:
        raise ConfigError(f"GGUF architecture {kind!r} is not supported; supported: {', '.join(_FAMILIES)}")

    def key(name: str, of: type, *default: Any) -> Any:
        return take(metadata, f"{kind}.{name}", of, *default) if default else need(metadata, f"{kind}.{name}", of)

    hidden_size, num_heads = key("embedding_length", int), key("attention.head_count", int)
    head_dim = key("attention.key_length", int, None) or key("rope.dimension_count", int, None)
    if head_dim is None:
        head_dim = head_dim_of(hidden_size, num_heads, f"{kind}.embedding_length", f"{kind}.attention.head_count")
    if key("attention.value_length", int, head_dim) != head_dim:
        raise ConfigError(
            f"{kind}.attention.value_length must equal the head size {head_dim}, got "
            f"{key('attention.value_length', int)}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = key("vocab_size", int, None) or (len(tokens) if tokens else None)
    if vocab_size is None:
        raise ConfigError(f"the GGUF file gives neither {kind}.vocab_size nor tokenizer.ggml.tokens")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    theta = key("rope.freq_base", float, 10000.0)
    num_experts = key("expert_count", int, 0)
    fields: dict[str, Any] = {
        "architecture": _FAMILIES[kind],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": key("feed_forward_length", int),
        "num_layers": key("block_count", int),
        "num_heads": num_heads,
        "num_kv_heads": metadata.get(f"{kind}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "norm_eps": key("attention.layer_norm_rms_epsilon", float),
        "rope": Rope(theta, key("rope.dimension_count", int, head_dim), _scaling(kind, key, rope_factors)),
        "max_position_embeddings": key("context_length", int),
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": tuple(end for i, end in enumerate(ends) if end is not None and end not in ends[:i]),
    }
    if num_experts:
        if kind not in ("llama", "qwen3moe"):
            raise ConfigError(f"mixtures of experts are not supported in {kind}, {kind}.expert_count is {num_experts}")
        size = key("expert_feed_forward_length", int, fields["intermediate_size"])
        fields |= {"num_experts": num_experts, "experts_per_token": key("expert_used_count", int), "expert_size": size}
        fields["architecture"] = "MixtralForCausalLM" if kind == "llama" else _FAMILIES[kind]
    if kind == "qwen2":
        fields["attention_bias"] = True
    if kind in ("qwen3", "qwen3moe", "gemma3"):
        fields["qk_norm"] = True
    if kind in ("gemma2", "gemma3"):
        fields |= _gemma(kind, key, hidden_size, fields)
    if kind == "phi3" and (window := key("attention.sliding_window", int, 0)):
        fields["windows"] = (window,) * max(0, min(fields["num_layers"], 1 << 14))
    return ModelConfig(**fields)


def _gemma(kind: str, key: Keys, hidden_size: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma without being told: patterns, scales; and what its keys say."""
    num_layers, window = max(0, min(fields["num_layers"], 1 << 14)), key("attention.sliding_window", int, 4096)
    every = 2 if kind == "gemma2" else 6
    soft = (50.0, 30.0) if kind == "gemma2" else (None, None)
    # 27B models scale queries by hidden size over heads, the others by the size of a head; converters note only that
    wide = (kind, num_layers) in (("gemma2", 46), ("gemma3", 62))
    return {
        "norm_offset": 1.0,
        "norm_placement": "sandwich",
        "activation": "gelu_tanh",
        "embedding_scale": max(1, hidden_size) ** 0.5,
        "attention_scale": (hidden_size / fields["num_heads"]) ** -0.5 if wide else None,
        "attention_softcap": key("attn_logit_softcapping", float, soft[0]),
        "logit_softcap": key("final_logit_softcapping", float, soft[1]),
        "windows": tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers)),
        "local_rope": Rope(key("rope.freq_base_swa", float, 10000.0), fields["head_dim"]) if kind == "gemma3" else None,
    }


def _scaling(kind: str, key: Keys, factors: Mapping[str, tuple[float, ...]]) -> RopeScaling | None:
    named = key("rope.scaling.type", str, "none")
    original = key("rope.scaling.original_context_length", int, 0)
    if "long" in factors and "short" in factors:
        scale = key("rope.scaling.attn_factor", float, 1.0)
        return RopeScaling(
            "longrope",
            original_max_position_embeddings=original,
            factors=factors["short"],
            long_factors=factors["long"],
            attention_factor=scale,
        )
    if "freqs" in factors:
        return RopeScaling("factors", factors=factors["freqs"])
    if named == "linear":
        return RopeScaling("linear", factor=key("rope.scaling.factor", float))
    if named == "yarn":
        factor = key("rope.scaling.factor", float)
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        attention = growth * key("rope.scaling.attn_factor", float, 1.0)
        return RopeScaling("yarn", factor, original_max_position_embeddings=original, attention_factor=attention)
    if named != "none":
        raise ConfigError(f"{kind}.rope.scaling.type must be none, linear or yarn, got {named!r}")
    return None


_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""llama.cpp's architectures and the families that they are; ``llama`` with experts is Mixtral."""
