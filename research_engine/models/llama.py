"""The Llama family (Touvron et al. 2023): pre-norm transformer, rotary positions, grouped-query attention, SwiGLU.

Shape letters: T tokens of the step (all requests, no padding), S rows that sample, H hidden size, I intermediate size,
Hq query heads, Hkv KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch

from research_engine import kernels
from research_engine.layers.embedding import Embedding, LMHead
from research_engine.layers.linear import GateUpLinear, Linear, QKVLinear
from research_engine.layers.rotary import cos_sin_table, inverse_frequencies
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig


class Layer:
    """Weights of one transformer layer, query/key/value and gate/up fused."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def bias(wanted: bool, size: int) -> torch.Tensor | None:
            return empty(size) if wanted else None

        hidden, inter = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_size = q_size + 2 * kv_size
        self.input_norm = empty(hidden)
        self.qkv = QKVLinear(empty(qkv_size, hidden), bias(config.attention_bias, qkv_size), q_size, kv_size)
        self.output = Linear(empty(hidden, q_size), bias(config.output_bias, hidden))
        self.post_attention_norm = empty(hidden)
        self.gate_up = GateUpLinear(empty(2 * inter, hidden), bias(config.mlp_bias, 2 * inter))
        self.down = Linear(empty(hidden, inter), bias(config.mlp_bias, hidden))

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view it is loaded into."""
        modules: dict[str, dict[str, torch.Tensor]] = {
            "input_layernorm": {"weight": self.input_norm},
            "post_attention_layernorm": {"weight": self.post_attention_norm},
            "self_attn.o_proj": self.output.parameters(),
            "mlp.down_proj": self.down.parameters(),
        }
        modules |= {f"self_attn.{name}_proj": views for name, views in self.qkv.parts().items()}
        modules |= {f"mlp.{name}_proj": views for name, views in self.gate_up.parts().items()}
        return {f"{prefix}{module}.{kind}": view for module, views in modules.items() for kind, view in views.items()}


class LlamaForCausalLM:
    """A decoder whose weights are plain tensors: no autograd, no modules.

    Life: construct (memory allocated, contents undefined), fill ``parameters()`` in place, ``prepare()`` once, then
    ``forward`` and ``compute_logits``.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.scale = config.head_dim**-0.5
        self.embedding = Embedding(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))
        self.layers = [Layer(config, dtype, self.device) for _ in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        self.lm_head = LMHead(self.embedding.weight if tied else torch.empty_like(self.embedding.weight))
        self.cos_sin = cos_sin_table(config, self.device)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Hugging Face's name -> the view to copy the tensor into. Every one is needed; valid until ``prepare()``."""
        views = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head.parameters()["weight"]
        for i, layer in enumerate(self.layers):
            views |= layer.parameters(f"model.layers.{i}.")
        return views

    def derived(self) -> dict[str, torch.Tensor]:
        """Tensors that some checkpoints carry although they follow from the rest, with the values they must have."""
        config = self.config
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta)  # stored before any context extension
        values = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(config.num_layers)}
        if config.tie_word_embeddings:
            values["lm_head.weight"] = self.embedding.weight
        return values

    def prepare(self) -> None:
        """Mutates: moves the loaded weights to the layouts their device is fastest with, one matrix at a time."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self.lm_head.pack()

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """One step over a ragged batch: ``token_ids``, ``positions`` int64 ``[T]`` -> hidden states ``[T, H]``, normed.

        Mutates the cache: this step's keys and values are written to their slots before they are attended to.
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_tokens = token_ids.shape[0]
        residual_TH = self.embedding(token_ids)
        hidden_TH = kernels.rms_norm(residual_TH, self.layers[0].input_norm, eps)
        # two buffers serve all layers; the products allocate their own
        attended_THqD = residual_TH.new_empty(num_tokens, config.num_heads, config.head_dim)
        gated_TI = residual_TH.new_empty(num_tokens, config.intermediate_size)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, cache, next_norm in zip(self.layers, attention.kv_cache, next_norms, strict=True):
            self._attend(layer, hidden_TH, positions, cache, attention, attended_THqD)
            hidden_TH = layer.output(attended_THqD.view(num_tokens, -1))
            kernels.fused_add_rms_norm(hidden_TH, residual_TH, layer.post_attention_norm, eps)
            kernels.silu_and_mul(layer.gate_up(hidden_TH), out=gated_TI)
            hidden_TH = layer.down(gated_TI)
            kernels.fused_add_rms_norm(hidden_TH, residual_TH, next_norm, eps)
        return hidden_TH

    def _attend(
        self,
        layer: Layer,
        hidden_TH: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        attention: AttentionMetadata,
        out_THqD: torch.Tensor,
    ) -> None:
        """Mutates ``cache [2, N, Hkv, B, D]`` and ``out_THqD``."""
        config, num_tokens = self.config, hidden_TH.shape[0]
        q, k, v = layer.qkv(hidden_TH).split(layer.qkv.sizes, dim=-1)
        q_THqD = q.view(num_tokens, config.num_heads, config.head_dim)
        k_THkvD = k.view(num_tokens, config.num_kv_heads, config.head_dim)
        v_THkvD = v.view(num_tokens, config.num_kv_heads, config.head_dim)
        key_cache, value_cache = cache[0], cache[1]
        kernels.rotary_embedding(positions, q_THqD, k_THkvD, self.cos_sin)
        kernels.reshape_and_cache(k_THkvD, v_THkvD, key_cache, value_cache, attention.slot_mapping)
        kernels.paged_attention(
            q_THqD,
            key_cache,
            value_cache,
            attention.block_tables,
            attention.query_start_loc,
            attention.seq_lens,
            scale=self.scale,
            out=out_THqD,
            max_query_len=attention.max_query_len,
            max_seq_len=attention.max_seq_len,
        )

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given: ``[S, H]`` -> float32 ``[S, V]``. Select the rows that sample before calling."""
        return self.lm_head(hidden_SH)
