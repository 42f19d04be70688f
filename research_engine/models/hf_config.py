"""Reads a Hugging Face config.json: what all models have, and a short function for what a family does differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from research_engine.models.config import ModelConfig
from research_engine.models.errors import ConfigError
from research_engine.models.families import names_of
from research_engine.models.hf_rope import gemma3_ropes, longest_sequence, rope_from_hf
from research_engine.models.quantization import quantization_from_hf
from research_engine.models.reading import ids, mapping, need, refuse_others, take

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""Activations by transformers' names for them."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one entry under ``architectures``.

    Raises:
        ConfigError: there is none, or there are several.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ConfigError(f"config.json must name exactly one entry under 'architectures', got {architectures!r}")
    return architectures[0]


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the dictionary of a Hugging Face ``config.json``.

    ``generation_config`` (``generation_config.json``), when it names end tokens, wins over ``config``, as in
    transformers' ``generate``.

    Raises:
        ConfigError: a key is missing, or its value is one this project does not implement.
    """
    architecture = architecture_of(config)
    names_of(architecture)
    eos = (generation_config or {}).get("eos_token_id")
    fields = _READERS[architecture](config)
    fields.setdefault("bos_token_id", config.get("bos_token_id"))
    fields["eos_token_ids"] = ids(fields.pop("eos_token_id", config.get("eos_token_id")) if eos is None else eos)
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        fields["quantization"] = quantization_from_hf(quantization)
    return ModelConfig(architecture=architecture, **fields)


def _activation(config: Mapping[str, Any], key: str, default: str) -> str:
    name = take(config, key, str, default)
    if name not in ACTIVATIONS:
        raise ConfigError(f"{key} must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def head_dim_of(hidden_size: int, num_heads: int, hidden_key: str, heads_key: str) -> int:
    """Size of a head where the configuration gives none."""
    if num_heads <= 0 or hidden_size % num_heads:
        raise ConfigError(
            f"{hidden_key} {hidden_size} is not a multiple of {heads_key} {num_heads}, and the configuration gives no "
            "size of a head"
        )
    return hidden_size // num_heads


def _llama(config: Mapping[str, Any], *, theta: float = 10000.0) -> dict[str, Any]:
    """Keys that Llama and all that came after it share."""
    if (config.get("pretraining_tp") or 1) != 1:
        raise ConfigError(f"pretraining_tp must be 1, got {config['pretraining_tp']}")
    refuse_others(config, "is_causal", (True, None), True)  # false in embedders that were made of a decoder
    hidden_size, num_heads = need(config, "hidden_size", int), need(config, "num_attention_heads", int)
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = head_dim_of(hidden_size, num_heads, "hidden_size", "num_attention_heads")
    elif not isinstance(head_dim, int) or not 0 < head_dim <= 1 << 13:
        raise ConfigError(f"head_dim must be an integer from 1 to {1 << 13}, got {head_dim!r}")
    rope, bias = rope_from_hf(config, head_dim, theta=theta), take(config, "attention_bias", bool, False)
    return {
        "vocab_size": need(config, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": need(config, "intermediate_size", int),
        "num_layers": need(config, "num_hidden_layers", int),
        "num_heads": num_heads,
        "num_kv_heads": take(config, "num_key_value_heads", int, num_heads),
        "head_dim": head_dim,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position_embeddings": longest_sequence(need(config, "max_position_embeddings", int), rope),
        "tie_word_embeddings": take(config, "tie_word_embeddings", bool, False),
        "activation": _activation(config, "hidden_act", "silu"),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": take(config, "mlp_bias", bool, False),
    }


def _windows(config: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """A window for each layer: as ``layer_types`` says, else for those that slide; empty without ``sliding_window``."""
    num_layers, window = need(config, "num_hidden_layers", int), take(config, "sliding_window", int, None)
    if not 0 < num_layers <= 1 << 14 or window is None:
        return ()
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types must name each of {num_layers} layers, got {kinds!r}")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ConfigError(f"layer_types must hold sliding_attention or full_attention, got {kind!r}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(w is not None for w in windows) else ()


def _mistral(config: Mapping[str, Any], *, theta: float = 10000.0) -> dict[str, Any]:
    everywhere = {key: value for key, value in config.items() if key != "layer_types"}
    return {**_llama(config, theta=theta), "windows": _windows(everywhere, lambda layer: True)}


def _qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not take(config, "use_sliding_window", bool, False):
        return ()
    first = take(config, "max_window_layers", int, 28)
    return _windows(config, lambda layer: layer >= first)


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "attention_bias": True, "output_bias": False, "windows": _qwen_windows(config)}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama({"head_dim": 128, **config}), "qk_norm": True, "windows": _qwen_windows(config)}


def _gemma(config: Mapping[str, Any], *, soft: tuple[float | None, float | None]) -> dict[str, Any]:
    """What Gemma 2 and 3 share; ``soft``: softcaps of attention and logits where the configuration names none."""
    config = {"head_dim": 256, "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh", **config}
    config["hidden_act"] = config.get("hidden_activation") or config["hidden_act"]
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention must be false for a decoder, got true")
    return {
        **_llama({"tie_word_embeddings": True, **config}),
        "norm_offset": 1.0,
        "norm_placement": "sandwich",
        "embedding_scale": need(config, "hidden_size", int) ** 0.5,
        "attention_scale": need({"query_pre_attn_scalar": 256, **config}, "query_pre_attn_scalar", float) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping", soft[0]),
        "logit_softcap": config.get("final_logit_softcapping", soft[1]),
    }


def _gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    windows = _windows({"sliding_window": 4096, **config}, lambda layer: layer % 2 == 0)
    return {**_gemma(config, soft=(50.0, 30.0)), "windows": windows}


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    every = take(config, "sliding_window_pattern", int, take(config, "_sliding_window_pattern", int, 6))
    if every <= 0:
        raise ConfigError(f"sliding_window_pattern must be a positive integer, got {every}")
    windows = _windows({"sliding_window": 4096, **config}, lambda layer: (layer + 1) % every != 0)
    plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    fields = _gemma(plain, soft=(None, None))
    full, local = gemma3_ropes(config, fields["head_dim"])
    return {**fields, "qk_norm": True, "windows": windows, "rope": full, "local_rope": local}


_GEMMA3_TEXT = {  # transformers' defaults, which the multimodal releases leave out of their text_config
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def _gemma3_multimodal(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a model that also takes images."""
    text = {**_GEMMA3_TEXT, **mapping(config, "text_config")}
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    special = {key: config.get(key) or text.get(key) for key in ("bos_token_id", "eos_token_id")}
    return {**_gemma3({**text, **tied}), **special}


def _phi3(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {"original_max_position_embeddings": 4096, "model_type": "phi3", "rms_norm_eps": 1e-5, **config}
    return _mistral(config)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("add_cross_attention", "reorder_and_upcast_attn"):
        refuse_others(config, key, (False, None), False)
    hidden_size, num_heads = need(config, "n_embd", int), need(config, "n_head", int)
    return {
        "vocab_size": need(config, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": take(config, "n_inner", int, 4 * hidden_size),
        "num_layers": need(config, "n_layer", int),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim_of(hidden_size, num_heads, "n_embd", "n_head"),
        "norm_eps": take(config, "layer_norm_epsilon", float, 1e-5),
        "max_position_embeddings": need(config, "n_positions", int),
        "position_offset": 0,
        "tie_word_embeddings": take(config, "tie_word_embeddings", bool, True),
        "activation": _activation(config, "activation_function", "gelu_new"),
        "attention_scale": None if take(config, "scale_attn_weights", bool, True) else 1.0,
        "scale_by_layer": take(config, "scale_attn_by_inverse_layer_idx", bool, False),
        **_PLAIN,
    }


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        refuse_others(config, key, (True,), True)
    hidden_size, num_heads = need(config, "hidden_size", int), need(config, "num_attention_heads", int)
    before = take(config, "do_layer_norm_before", bool, True)
    embedded = take(config, "word_embed_proj_dim", int, hidden_size)
    return {
        "vocab_size": need(config, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": need(config, "ffn_dim", int),
        "num_layers": need(config, "num_hidden_layers", int),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim_of(hidden_size, num_heads, "hidden_size", "num_attention_heads"),
        "norm_eps": 1e-5,
        "max_position_embeddings": need(config, "max_position_embeddings", int),
        "position_offset": 2,
        "tie_word_embeddings": take(config, "tie_word_embeddings", bool, True),
        "activation": _activation(config, "activation_function", "relu"),
        "norm_placement": "pre" if before else "post",
        "final_norm": before and not take(config, "_remove_final_layer_norm", bool, False),
        "embedding_size": None if embedded == hidden_size else embedded,
        **_PLAIN,
    }


_PLAIN = {"norm": "layer", "gated": False, "attention_bias": True, "output_bias": True, "mlp_bias": True}
"""What GPT-2, OPT and BERT share."""


def _bert(config: Mapping[str, Any], *, first_position: int = 0) -> dict[str, Any]:
    """An encoder; `first_position`: row of the position embeddings that a text's first token takes."""
    refuse_others(config, "position_embedding_type", ("absolute", None), "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        refuse_others(config, key, (False, None), False)
    hidden_size, num_heads = need(config, "hidden_size", int), need(config, "num_attention_heads", int)
    return {
        "vocab_size": need(config, "vocab_size", int),
        "hidden_size": hidden_size,
        "intermediate_size": need(config, "intermediate_size", int),
        "num_layers": need(config, "num_hidden_layers", int),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim_of(hidden_size, num_heads, "hidden_size", "num_attention_heads"),
        "norm_eps": take(config, "layer_norm_eps", float, 1e-12),
        "max_position_embeddings": need(config, "max_position_embeddings", int) - first_position,
        "position_offset": first_position,
        "num_token_types": need({"type_vocab_size": 2, **config}, "type_vocab_size", int),
        "embedding_norm": True,
        "activation": _activation(config, "hidden_act", "gelu"),
        "norm_placement": "post",
        "final_norm": False,
        "causal": False,
        "head": False,
        **_PLAIN,
    }


def _roberta(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoBERTa and XLM-RoBERTa keep the rows up to the padding token's id free: positions begin after it."""
    return _bert(config, first_position=take(config, "pad_token_id", int, 1) + 1)


def _mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_mistral(config, theta=1e6),
        "num_experts": need(config, "num_local_experts", int),
        "experts_per_token": need(config, "num_experts_per_tok", int),
        "expert_size": need(config, "intermediate_size", int),
    }


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, step = need(config, "num_hidden_layers", int), take(config, "decoder_sparse_step", int, 1)
    if step <= 0:
        raise ConfigError(f"decoder_sparse_step must be a positive integer, got {step}")
    dense = set(config.get("mlp_only_layers") or ())
    slides = take(config, "use_sliding_window", bool, False)
    return {
        **(_mistral if slides else _llama)(config),
        "qk_norm": True,
        "num_experts": need({"num_experts": config.get("num_local_experts"), **config}, "num_experts", int),
        "experts_per_token": need(config, "num_experts_per_tok", int),
        "expert_size": need(config, "moe_intermediate_size", int),
        "normalize_experts": take(config, "norm_topk_prob", bool, False),
        "dense_layers": tuple(n for n in range(min(num_layers, 1 << 14)) if n in dense or (n + 1) % step != 0),
    }


def _bare(reader: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Of a decoder that was published without its output projection."""
    return lambda config: {**reader(config), "head": False}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_multimodal,
    "Phi3ForCausalLM": _phi3,
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": _opt,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "LlamaModel": _bare(_llama),
    "MistralModel": _bare(_mistral),
    "Qwen2Model": _bare(_qwen2),
    "Qwen3Model": _bare(_qwen3),
    "BertModel": _bert,
    "BertForMaskedLM": _bert,
    "RobertaModel": _roberta,
    "RobertaForMaskedLM": _roberta,
    "XLMRobertaModel": _roberta,
    "XLMRobertaForMaskedLM": _roberta,
}
