"""The shape and constants of a transformer, and in what its family differs from Llama; checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from research_engine.models.errors import ConfigError
from research_engine.models.quantization import Quantization
from research_engine.models.rope import Rope, RopeScaling

__all__ = ["ConfigError", "ModelConfig", "Rope", "RopeScaling"]

MAX_POSITIONS = 1 << 24  # beyond any model; the rotary table has a row for each
_MOST = {  # of sizes; beyond any model, and small enough that products of two stay far from 2**63
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 1 << 14,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 13,
    "max_position_embeddings": MAX_POSITIONS,
    "embedding_size": 1 << 20,
    "num_token_types": 1 << 14,
    "num_experts": 1 << 14,
    "experts_per_token": 1 << 14,
    "expert_size": 1 << 22,
}
_CHOICES = {
    "norm": ("rms", "layer"),
    "norm_placement": ("pre", "sandwich", "post"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything a model is built from; the defaults are Llama's. Sizes count elements, ids tokens of the vocabulary.

    Args:
        intermediate_size: of a dense feed-forward layer.
        norm_eps: added under the root of every norm.
        rope: rotary positions, None without; local_rope: those of layers with a window, where they differ.
        max_position_embeddings: the longest sequence.
        attention_bias, output_bias, mlp_bias: biases on the query, key and value projections; on the attention's output
            projection; on the projections of the feed-forward layer.
        norm: "rms" or "layer" (mean removed, with bias); norm_offset: what is added to a norm's stored weight (Gemma's
            norms are 1 + w).
        norm_placement: "pre" norms what enters attention and feed-forward layer, "sandwich" also what leaves them,
            before it is added; "post" norms the sum after it was added.
        final_norm: whether the last layer's output is normed.
        qk_norm: whether every query and key head is normed before it is rotated.
        activation, gated: of the feed-forward layer: act(gate(x)) * up(x), or act(up(x)).
        attention_scale: factor of query-key products, None for head_dim ** -0.5; scale_by_layer: divided by the number
            of the layer, counted from 1, as well.
        attention_softcap, logit_softcap: c in c * tanh(x / c), of attention scores and logits; None without.
        windows: how many keys a row of each layer sees, its own included, None for all; empty: None for every layer.
        embedding_scale: factor of the token embeddings.
        embedding_size: of the token embeddings where it is not hidden_size; a projection leads in and one out.
        position_offset: learned position embeddings, position p in row p + offset; None without.
        num_token_types: rows of a second embedding, of which every token takes row 0 (BERT); embedding_norm: whether
            the sum of all embeddings is normed.
        causal: whether a token sees none after it; an encoder's tokens see all of their text.
        head: whether there is an output projection; a model without one embeds and does not generate.
        num_experts: of a mixture-of-experts layer, 0 without; experts_per_token: how many a token takes;
            expert_size: intermediate size of an expert; normalize_experts: whether the shares of those taken sum to 1.
        dense_layers: layers with an ordinary feed-forward layer in a model with experts.
        quantization: of the checkpoint's matrices, None for floats.

    Raises:
        ConfigError: a value is out of range, heads do not divide, or a token id lies outside the vocabulary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: Rope | None = None
    local_rope: Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    norm_offset: float = 0.0
    norm_placement: str = "pre"
    final_norm: bool = True
    qk_norm: bool = False
    activation: str = "silu"
    gated: bool = True
    attention_scale: float | None = None
    scale_by_layer: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    embedding_scale: float = 1.0
    embedding_size: int | None = None
    position_offset: int | None = None
    num_token_types: int = 0
    embedding_norm: bool = False
    causal: bool = True
    head: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()
    quantization: Quantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_field(field.name, str(field.type), getattr(self, field.name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.dim > self.head_dim:
                raise ConfigError(f"rope turns {rope.dim} elements of a head, which has {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"windows must name each of {self.num_layers} layers, got {len(self.windows)}")
        for window in self.windows:
            if window is not None and not (_is_integer(window) and window > 0):
                raise ConfigError(f"a sliding window must be a positive integer or None, got {window!r}")
        if self.num_experts and not (0 < self.experts_per_token <= self.num_experts and self.expert_size > 0):
            raise ConfigError(
                f"a model with experts needs 1 <= experts_per_token <= num_experts = {self.num_experts} and an "
                f"expert_size >= 1, got {self.experts_per_token} and {self.expert_size}"
            )
        for layer in self.dense_layers:
            if not (_is_integer(layer) and 0 <= layer < self.num_layers):
                raise ConfigError(f"dense layer {layer!r} is none of {self.num_layers} layers")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not _is_integer(token_id):
                raise ConfigError(f"special token id {token_id!r} must be an integer")
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"special token id {token_id} lies outside the vocabulary of {self.vocab_size}")

    @staticmethod
    def _check_field(name: str, kind: str, value: Any) -> None:
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}")
        if name in _MOST and value is not None:
            least = 0 if "expert" in name or name == "num_token_types" else 1
            if not _is_integer(value) or value < least:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
            if value > _MOST[name]:
                raise ConfigError(f"{name} must be at most {_MOST[name]}, got {value}")
        if kind == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        if name == "position_offset" and value is not None and not (_is_integer(value) and 0 <= value <= 1024):
            raise ConfigError(f"position_offset must be an integer from 0 to 1024, got {value!r}")
        if kind.startswith("float") and name != "norm_offset" and not (value is None and "None" in kind):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be a positive number, got {value!r}")

    def window(self, layer: int) -> int | None:
        """How many keys a row of the layer sees, its own included; None for all."""
        return self.windows[layer] if self.windows else None

    def scale(self, layer: int) -> float:
        """Factor of the layer's query-key products."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers, at one byte an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output projection counted once."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm = hidden * (2 if self.norm == "layer" else 1)
        attention = hidden * (q + 2 * kv) + q * hidden + self.attention_bias * (q + 2 * kv) + self.output_bias * hidden
        attention += 2 * self.head_dim * self.qk_norm
        num_norms = 4 if self.norm_placement == "sandwich" else 2
        widths = (2 if self.gated else 1) * self.intermediate_size
        dense = hidden * (widths + self.intermediate_size) + self.mlp_bias * (widths + hidden)
        experts = self.num_experts * 3 * hidden * self.expert_size + self.num_experts * hidden
        num_sparse = sum(map(self.has_experts, range(self.num_layers)))
        embedded = self.embedding_size or hidden
        total = self.vocab_size * embedded * (1 if self.tie_word_embeddings or not self.head else 2)
        total += self.num_token_types * hidden + norm * self.embedding_norm
        total += 2 * embedded * hidden if self.embedding_size is not None else 0
        if self.position_offset is not None:
            total += (self.max_position_embeddings + self.position_offset) * hidden
        total += norm * self.final_norm + self.num_layers * (attention + num_norms * norm)
        return total + num_sparse * experts + (self.num_layers - num_sparse) * dense

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """See `hf_config.config_from_hf`."""
        from research_engine.models.hf_config import config_from_hf

        return config_from_hf(config, generation_config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tied: bool, rope_factors: Mapping[str, tuple[float, ...]] | None = None
    ) -> ModelConfig:
        """See `gguf_config.config_from_gguf`."""
        from research_engine.models.gguf_config import config_from_gguf

        return config_from_gguf(metadata, tied=tied, rope_factors=rope_factors or {})


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
