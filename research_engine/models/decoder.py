"""The one definition of a transformer: token embedding, layers of attention and feed-forward, output projection.

What a family does differently is data (`ModelConfig`), and so are the names of its tensors (`families.Names`).

    x = embed(token)  [* scale] [+ type] [+ position] [normed]
    pre        x += attention(norm(x));         x += mlp(norm(x));          logits of norm(x)
    sandwich   x += norm(attention(norm(x)));   x += norm(mlp(norm(x)));    logits of norm(x)
    post       x = norm(x + attention(x));      x = norm(x + mlp(x));       logits of x

Every `x += ...; norm(x)` is one fused operation: the sum and the norm that reads it next.

Shape letters: T tokens of the step (all requests, no padding), S rows that sample, H hidden size, I intermediate size,
Hq query heads, Hkv KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from research_engine.layers.attention import Attention
from research_engine.layers.embedding import Embedding, LMHead
from research_engine.layers.invariant import ROWS_AT_ONCE
from research_engine.layers.linear import GateUpLinear, Linear, QKVLinear
from research_engine.layers.mlp import GatedMLP, PlainMLP
from research_engine.layers.moe import MixtureOfExperts, can_group
from research_engine.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm
from research_engine.layers.rotary import cos_sin_table, inverse_frequencies
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig
from research_engine.models.families import Names, names_of
from research_engine.models.rope import Rope


class _Weights:
    """Makes the parts of a model, their memory not yet filled."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, matrices: torch.device | None = None
    ) -> None:
        self.config, self.dtype, self.device, self._matrices = config, dtype, device, matrices or device

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int) -> torch.Tensor:
        """Of a linear layer inside a layer of the model."""
        return torch.empty(shape, dtype=self.dtype, device=self._matrices)

    def bias(self, wanted: bool, size: int) -> torch.Tensor | None:
        return self.empty(size) if wanted else None

    def norm(self) -> Norm:
        config, size = self.config, self.config.hidden_size
        if config.norm == "layer":
            return LayerNorm(self.empty(size), self.empty(size), config.norm_eps)
        return RMSNorm(self.empty(size), config.norm_eps, config.norm_offset)

    def attention(self, layer: int, cos_sin: torch.Tensor | None) -> Attention:
        config, hidden = self.config, self.config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_size = q_size + 2 * kv_size
        q_norm, k_norm = (
            RMSNorm(self.empty(config.head_dim), config.norm_eps, config.norm_offset) if config.qk_norm else None
            for _ in range(2)
        )
        return Attention(
            QKVLinear(self.matrix(qkv_size, hidden), self.bias(config.attention_bias, qkv_size), q_size, kv_size),
            Linear(self.matrix(hidden, q_size), self.bias(config.output_bias, hidden)),
            layer=layer,
            head_dim=config.head_dim,
            scale=config.scale(layer),
            window=config.window(layer),
            softcap=config.attention_softcap,
            causal=config.causal,
            cos_sin=cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def mlp(self) -> GatedMLP | PlainMLP:
        config, hidden, inter = self.config, self.config.hidden_size, self.config.intermediate_size
        down = Linear(self.matrix(hidden, inter), self.bias(config.mlp_bias, hidden))
        if config.gated:
            gate_up = GateUpLinear(self.matrix(2 * inter, hidden), self.bias(config.mlp_bias, 2 * inter))
            return GatedMLP(gate_up, down, config.activation)
        up = Linear(self.matrix(inter, hidden), self.bias(config.mlp_bias, inter))
        return PlainMLP(up, down, config.activation)

    def experts(self) -> MixtureOfExperts:
        config, hidden, inter = self.config, self.config.hidden_size, self.config.expert_size
        count, stacked = config.num_experts, None
        if self._matrices == self.device and can_group(self.device, self.dtype, (hidden, inter)):
            stacked = self.empty(count, 2 * inter, hidden), self.empty(count, hidden, inter)
            matrices = [list(stack.unbind()) for stack in stacked]
        else:
            shapes = ((2 * inter, hidden), (hidden, inter))
            matrices = [[self.matrix(*shape) for _ in range(count)] for shape in shapes]
        return MixtureOfExperts(
            Linear(self.empty(count, hidden)),
            [GateUpLinear(matrix) for matrix in matrices[0]],
            [Linear(matrix) for matrix in matrices[1]],
            experts_per_token=config.experts_per_token,
            normalize=config.normalize_experts,
            activation=config.activation,
            stacked=stacked,
        )


class Layer:
    """One layer: attention and feed-forward part, each with its norms."""

    def __init__(self, weights: _Weights, index: int, cos_sin: torch.Tensor | None) -> None:
        config = weights.config
        sandwich = config.norm_placement == "sandwich"
        self.attention_norm, self.mlp_norm = weights.norm(), weights.norm()
        self.attention_out_norm = weights.norm() if sandwich else None
        self.mlp_out_norm = weights.norm() if sandwich else None
        self.attention = weights.attention(index, cos_sin)
        self.mlp: GatedMLP | PlainMLP | MixtureOfExperts
        self.mlp = weights.experts() if config.has_experts(index) else weights.mlp()

    def parameters(self, names: Names, index: int) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view it is loaded into."""
        norms = {
            "attention_norm": self.attention_norm,
            "attention_out_norm": self.attention_out_norm,
            "mlp_norm": self.mlp_norm,
            "mlp_out_norm": self.mlp_out_norm,
        }
        parts = {part: norm.parameters() for part, norm in norms.items() if norm is not None}
        parts |= _as_stored(names, self.attention.parts(), "qkv", ("q", "k", "v"))
        parts |= _as_stored(names, self.mlp.parts(), "gate_up", ("gate", "up"))
        views = {
            f"{names.part(index, part)}.{kind}": view.t() if names.transposed and view.dim() == 2 else view
            for part, kinds in parts.items()
            for kind, view in kinds.items()
        }
        if isinstance(self.mlp, MixtureOfExperts):
            for number, expert in enumerate(self.mlp.expert_parts()):
                for part, kinds in expert.items():
                    views |= {f"{names.part(index, part, number)}.{kind}": view for kind, view in kinds.items()}
        return views


def _as_stored(
    names: Names, parts: dict[str, dict[str, torch.Tensor]], fused: str, apart: tuple[str, ...]
) -> dict[str, dict[str, torch.Tensor]]:
    """Of a fused matrix and its rows apart: what the checkpoint holds."""
    if fused not in parts:
        return parts
    left_out = apart if fused in names.parts else (fused,)
    return {part: views for part, views in parts.items() if part not in left_out}


class Decoder:
    """A decoder, or an encoder as its configuration says, whose weights are plain tensors: no autograd, no modules.

    Life: construct (memory allocated, contents undefined), fill ``parameters()`` in place, ``prepare()`` once, then
    ``forward`` and ``compute_logits``.

    Args:
        max_model_len: the longest sequence to be served, None for all that the model reaches. Rotary tables have a row
            for each of its positions, and scalings that depend on the longest sequence take it from here.
        defer_matrices: make the layers' matrices without memory, for ``Linear.quantize`` or ``Linear.materialize``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        defer_matrices: bool = False,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.kv_scales: torch.Tensor | None = (
            None  # float32 [L, 2], of a quantised cache, if the checkpoint brings them
        )
        self.names, self.defers_matrices = names_of(config.architecture), defer_matrices
        longest = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        weights = _Weights(config, dtype, self.device, torch.device("meta") if defer_matrices else None)
        embedded = config.embedding_size or config.hidden_size
        self.embedding = Embedding(weights.empty(config.vocab_size, embedded))
        # rounded to the weights' dtype, as in the reference implementation
        self._embedding_scale = None if config.embedding_scale == 1 else _rounded(config.embedding_scale, dtype)
        self.project_in = self.project_out = None
        if config.embedding_size is not None:
            self.project_in = Linear(weights.empty(config.hidden_size, embedded))
            self.project_out = Linear(weights.empty(embedded, config.hidden_size))
        self.position_embedding = None
        if config.position_offset is not None:
            rows = config.max_position_embeddings + config.position_offset
            self.position_embedding = Embedding(weights.empty(rows, config.hidden_size))
        self.token_type_embedding = None
        if config.num_token_types:
            self.token_type_embedding = Embedding(weights.empty(config.num_token_types, config.hidden_size))
        self.embedding_norm = weights.norm() if config.embedding_norm else None
        self.layers = [Layer(weights, i, table) for i, table in enumerate(_rotary_tables(config, longest, self.device))]
        self.norm: Norm = weights.norm() if config.final_norm else NoNorm()
        self.lm_head: LMHead | None = None
        if config.head:
            tied = config.tie_word_embeddings
            self.lm_head = LMHead(self.embedding.weight if tied else torch.empty_like(self.embedding.weight))
        self._norm_pairs = self._pair_norms()

    def _pair_norms(self) -> list[tuple[Norm, Norm]]:
        """For each layer: the norm that follows its attention's sum, and the one that follows its feed-forward's."""
        if self.config.norm_placement == "post":
            return [(layer.attention_norm, layer.mlp_norm) for layer in self.layers]
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        return [(layer.mlp_norm, after) for layer, after in zip(self.layers, next_norms, strict=True)]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The checkpoint's name -> the view to copy the tensor into. Every one is needed; valid until ``prepare()``."""
        names = self.names
        modules = {names.prefix + names.embedding: {"weight": self.embedding.weight}}
        if self.position_embedding is not None:
            modules[names.prefix + names.positions] = {"weight": self.position_embedding.weight}
        if self.token_type_embedding is not None:
            modules[names.prefix + names.token_types] = {"weight": self.token_type_embedding.weight}
        if self.embedding_norm is not None:
            modules[names.prefix + names.embedding_norm] = self.embedding_norm.parameters()
        if self.project_in is not None and self.project_out is not None:
            modules[names.prefix + names.project_in] = self.project_in.parameters()
            modules[names.prefix + names.project_out] = self.project_out.parameters()
        modules[names.prefix + names.final_norm] = self.norm.parameters()
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            modules[names.head] = self.lm_head.parameters()
        views = {f"{module}.{kind}": view for module, kinds in modules.items() for kind, view in kinds.items()}
        for i, layer in enumerate(self.layers):
            views |= layer.parameters(names, i)
        return views

    def matrices(self) -> list[tuple[Linear, tuple[str, ...]]]:
        """The layers' linear layers, each with the checkpoint's names of its rows, from the first to the last."""
        found = []
        for i, layer in enumerate(self.layers):
            for linear, parts, expert in (*layer.attention.matrices(), *layer.mlp.matrices()):
                fused = {"q": "qkv", "gate": "gate_up"}.get(parts[0], "")
                if fused in self.names.parts:
                    parts = (fused,)
                found.append((linear, tuple(f"{self.names.part(i, part, expert)}.weight" for part in parts)))
        return found

    def derived(self) -> dict[str, torch.Tensor]:
        """Tensors that some checkpoints carry although they follow from the rest, with the values they must have."""
        values = {}
        if self.config.rope is not None:  # stored before any context extension
            plain = inverse_frequencies(Rope(self.config.rope.theta, self.config.rope.dim))
            layer = self.names.prefix + self.names.layer
            values = {f"{layer.format(i)}self_attn.rotary_emb.inv_freq": plain for i in range(self.config.num_layers)}
        if self.config.head and self.config.tie_word_embeddings:
            values[f"{self.names.head}.weight"] = self.embedding.weight
        return values

    def prepare(self) -> None:
        """Mutates: moves the loaded weights to the layouts their device is fastest with, one matrix at a time."""
        for linear in self._linears():
            linear.pack()

    @property
    def capturable(self) -> bool:
        """Whether a step waits for nothing, so that it can be a CUDA graph: experts one by one ask for their rows."""
        experts = (layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts))
        return all(mlp.stacked is not None for mlp in experts)

    def make_batch_invariant(self) -> None:
        """Mutates: from now on a row's result is the same bits whatever else is in the batch, at some cost.

        Raises:
            ValueError: experts on a GPU, whose grouped product has no such mode.
        """
        if self.config.num_experts and self.device.type == "cuda":
            raise ValueError("batch_invariant: experts are one grouped product on a GPU, which is not invariant")
        for linear in self._linears():
            linear.rows_at_once = ROWS_AT_ONCE[self.device.type]
        for layer in self.layers:
            layer.attention.make_batch_invariant()

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (*layer.attention.linears(), *layer.mlp.linears())
        for projection in (self.project_in, self.project_out, self.lm_head):
            if projection is not None:
                yield projection

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        """One step over a ragged batch: ``token_ids``, ``positions`` int64 ``[T]`` -> hidden states ``[T, H]``, normed.

        Mutates the cache: this step's keys and values are written to their slots before they are attended to.
        """
        config, num_tokens = self.config, token_ids.shape[0]
        post = config.norm_placement == "post"
        residual_TH = self._embed(token_ids, positions)
        hidden_TH = residual_TH if post else self.layers[0].attention_norm(residual_TH)
        # two buffers serve all layers; the products allocate their own
        attended_THqD = residual_TH.new_empty(num_tokens, config.num_heads, config.head_dim)
        gated_TI = residual_TH.new_empty(num_tokens, config.intermediate_size if config.gated else 0)
        for layer, cache, (middle, end) in zip(self.layers, attention.kv_cache, self._norm_pairs, strict=True):
            hidden_TH = layer.attention(hidden_TH, positions, cache, attention, attended_THqD)
            if layer.attention_out_norm is not None:
                hidden_TH = layer.attention_out_norm(hidden_TH)
            hidden_TH = middle.add(hidden_TH, residual_TH)
            if post:
                residual_TH = hidden_TH
            hidden_TH = layer.mlp(hidden_TH, gated_TI)
            if layer.mlp_out_norm is not None:
                hidden_TH = layer.mlp_out_norm(hidden_TH)
            hidden_TH = end.add(hidden_TH, residual_TH)
            if post:
                residual_TH = hidden_TH
        return hidden_TH if self.project_out is None else self.project_out(hidden_TH)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[T] -> [T, H]``, memory of its own."""
        embedded = self.embedding(token_ids)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        if self._embedding_scale is not None:
            embedded *= self._embedding_scale
        if self.token_type_embedding is not None:
            embedded += self.token_type_embedding.weight[0]
        if self.position_embedding is not None:
            embedded += self.position_embedding(positions + (self.config.position_offset or 0))
        return embedded if self.embedding_norm is None else self.embedding_norm(embedded)

    @torch.inference_mode()
    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given: ``[S, H]`` -> ``[S, V]``, float32 or as ``LMHead`` says.

        Select the rows that sample before calling.
        """
        assert self.lm_head is not None, f"{self.config.architecture} has no output projection"
        logits, cap = self.lm_head(hidden_SH), self.config.logit_softcap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)


def _rotary_tables(config: ModelConfig, longest: int, device: torch.device) -> list[torch.Tensor | None]:
    """Each layer's table; layers of a kind share one."""
    shared = None if config.rope is None else cos_sin_table(config.rope, longest, device)
    local = shared if config.local_rope is None else cos_sin_table(config.local_rope, longest, device)
    return [shared if config.window(i) is None else local for i in range(config.num_layers)]


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))
