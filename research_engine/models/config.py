"""The shape and constants of a model, read from a Hugging Face config.json or from GGUF metadata, and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ROPE_KINDS = ("linear", "llama3", "factors")
MAX_POSITIONS = 1 << 24  # beyond any model; the rotary table has a row for each


class ConfigError(ValueError):
    """A model configuration breaks a rule; the message names the key, its value and the rule."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a longer context differ from those of the original one.

    - ``linear``: every frequency divided by ``factor`` (Chen et al. 2023, position interpolation).
    - ``llama3``: frequencies of wavelengths above ``original_max_position_embeddings / low_freq_factor`` divided by
      ``factor``, those below ``.../high_freq_factor`` kept, a linear blend between (the Llama 3.1 release).
    - ``factors``: frequency ``i`` divided by ``factors[i]`` (what GGUF files store as ``rope_freqs.weight``).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(f"rope scaling factor must be a positive number, got {self.factor}")
        if self.kind == "llama3":
            if self.original_max_position_embeddings <= 0:
                raise ConfigError(
                    "llama3 rope scaling needs original_max_position_embeddings > 0, "
                    f"got {self.original_max_position_embeddings}"
                )
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise ConfigError(
                    "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, "
                    f"got {self.low_freq_factor} and {self.high_freq_factor}"
                )
        if self.kind == "factors" and not (self.factors and all(f > 0 and math.isfinite(f) for f in self.factors)):
            raise ConfigError(f"rope frequency factors must be positive numbers, got {self.factors}")


@dataclass(frozen=True)
class ModelConfig:
    """Everything a model of the Llama family is built from. Sizes count elements; ids count tokens of the vocabulary.

    ``attention_bias`` puts biases on the query, key and value projections, ``output_bias`` on the attention's output
    projection, ``mlp_bias`` on the three projections of the MLP.

    Raises:
        ConfigError: a size is not positive, heads do not divide, or a token id lies outside the vocabulary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
                raise ConfigError(f"{field.name} must be a positive integer, got {value!r}")
            if field.type == "float" and not (isinstance(value, (int, float)) and value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name} must be a positive number, got {value!r}")
        if self.max_position_embeddings > MAX_POSITIONS:
            raise ConfigError(
                f"max_position_embeddings must be at most {MAX_POSITIONS}, got {self.max_position_embeddings}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if (
            self.rope_scaling
            and self.rope_scaling.kind == "factors"
            and len(self.rope_scaling.factors) != self.head_dim // 2
        ):
            raise ConfigError(
                f"rope frequency factors must number head_dim / 2 = {self.head_dim // 2}, "
                f"got {len(self.rope_scaling.factors)}"
            )
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ConfigError(f"special token id {token_id!r} must be an integer")
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"special token id {token_id} lies outside the vocabulary of {self.vocab_size}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers, at one byte an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output projection counted once."""
        q, kv, hidden, inter = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        attention = hidden * (q + 2 * kv) + q * hidden + self.attention_bias * (q + 2 * kv) + self.output_bias * hidden
        mlp = 3 * hidden * inter + self.mlp_bias * (2 * inter + hidden)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * hidden) + hidden + embeddings

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the dictionary of a Hugging Face ``config.json``.

        ``generation_config`` (``generation_config.json``), when it names end tokens, wins over ``config``, as in
        transformers' ``generate``.

        Raises:
            ConfigError: a key is missing, or its value is one this project does not implement.
        """
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1:
            raise ConfigError(f"config.json must name exactly one entry under 'architectures', got {architectures!r}")
        _refuse(config, "hidden_act", ("silu", "swish"), default="silu")
        if config.get("quantization_config"):
            method = _mapping(config, "quantization_config").get("quant_method", "an unnamed method")
            raise ConfigError(
                f"weights quantized with {method} are not supported; use the float safetensors or a GGUF file"
            )
        if (config.get("pretraining_tp") or 1) != 1:
            raise ConfigError(f"pretraining_tp must be 1, got {config['pretraining_tp']}")
        hidden_size, num_heads = _need(config, "hidden_size", int), _need(config, "num_attention_heads", int)
        head_dim = config.get("head_dim")
        if head_dim is None:
            if num_heads <= 0 or hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                    "and config.json gives no head_dim"
                )
            head_dim = hidden_size // num_heads
        theta, scaling = _rope_from_hf(config)
        bias = bool(config.get("attention_bias", False))
        eos = (generation_config or {}).get("eos_token_id")
        return cls(
            architecture=architectures[0],
            vocab_size=_need(config, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_need(config, "intermediate_size", int),
            num_layers=_need(config, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_position_embeddings=_need(config, "max_position_embeddings", int),
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_ids(config.get("eos_token_id") if eos is None else eos),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, tied: bool, rope_factors: tuple[float, ...] = ()) -> ModelConfig:
        """Read the metadata of a GGUF file of llama.cpp's ``llama`` architecture.

        ``tied`` says that the file has no ``output.weight``; ``rope_factors`` is its ``rope_freqs.weight``, if any.

        Raises:
            ConfigError: a key is missing, or its value is one this project does not implement.
        """
        architecture = _need(metadata, "general.architecture", str)
        if architecture != "llama":
            raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported: llama")

        def need(key: str, kind: type) -> Any:
            return _need(metadata, f"llama.{key}", kind)

        if metadata.get("llama.expert_count", 0):
            raise ConfigError(
                f"mixtures of experts are not supported, llama.expert_count is {metadata['llama.expert_count']}"
            )
        hidden_size, num_heads = need("embedding_length", int), need("attention.head_count", int)
        head_dim = metadata.get("llama.attention.key_length") or metadata.get("llama.rope.dimension_count")
        if head_dim is None:
            if num_heads <= 0 or hidden_size % num_heads:
                raise ConfigError(
                    f"llama.embedding_length {hidden_size} is not a multiple of llama.attention.head_count "
                    f"{num_heads}, and the file gives no llama.rope.dimension_count"
                )
            head_dim = hidden_size // num_heads
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if metadata.get(key, head_dim) != head_dim:
                raise ConfigError(f"{key} must equal the head size {head_dim}, got {metadata[key]}")
        scaling = RopeScaling("factors", factors=rope_factors) if rope_factors else None
        kind = metadata.get("llama.rope.scaling.type", "none")
        if kind == "linear":
            scaling = RopeScaling("linear", factor=need("rope.scaling.factor", float))
        elif kind != "none":
            raise ConfigError(f"llama.rope.scaling.type must be none or linear, got {kind!r}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocab_size = metadata.get("llama.vocab_size") or (len(tokens) if tokens else None)
        if vocab_size is None:
            raise ConfigError("the GGUF file gives neither llama.vocab_size nor tokenizer.ggml.tokens")
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            architecture="LlamaForCausalLM",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=need("feed_forward_length", int),
            num_layers=need("block_count", int),
            num_heads=num_heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=need("attention.layer_norm_rms_epsilon", float),
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            max_position_embeddings=need("context_length", int),
            rope_scaling=scaling,
            tie_word_embeddings=tied,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(end for i, end in enumerate(ends) if end is not None and end not in ends[:i]),
        )


def _need(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """``config[key]``, of the wanted type; an integer passes for a float."""
    if key not in config or config[key] is None:
        raise ConfigError(f"the model's configuration lacks {key!r}")
    value = config[key]
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ConfigError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _refuse(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise ConfigError(f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping, got {value!r}")
    return value


def _ids(value: Any) -> tuple[Any, ...]:
    """One id, a list of them or none; what they are is checked with the rest."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    parameters = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    keys = ["factor"]
    if kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    return theta, RopeScaling(kind, **{key: _need(parameters, key, float) for key in keys})
