"""Attention of one layer over the paged cache: projections, head norms, rotary positions, cache write, attention."""

from __future__ import annotations

from typing import Any

import torch

from research_engine import kernels
from research_engine.layers.invariant import SPLIT_SIZE
from research_engine.layers.linear import Linear, QKVLinear
from research_engine.layers.norm import RMSNorm
from research_engine.models.attention_metadata import AttentionMetadata


class Attention:
    """Grouped-query attention (Ainslie et al. 2023).

    Args:
        qkv, output: the projections, query, key and value fused.
        layer: the layer's number.
        head_dim: D.
        scale: of query-key products.
        window: how many keys a row sees, its own included; None for all.
        softcap: of scores; None without.
        causal: whether a token sees none after it.
        cos_sin: rotary table, None without rotary positions.
        q_norm, k_norm: of every head before it is rotated.
    """

    def __init__(
        self,
        qkv: QKVLinear,
        output: Linear,
        *,
        layer: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        causal: bool = True,
        cos_sin: torch.Tensor | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.qkv, self.output, self.layer, self.head_dim, self.scale = qkv, output, layer, head_dim, scale
        self.window, self.softcap, self.causal, self.cos_sin = window, softcap, causal, cos_sin
        self.invariant: dict[str, Any] | None = None
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        attention: AttentionMetadata,
        attended_THqD: torch.Tensor,
    ) -> torch.Tensor:
        """``[T, H] -> [T, H]``. Mutates ``cache [2, N, Hkv, B, D]`` and ``attended_THqD``, memory that layers share."""
        num_tokens = x.shape[0]
        q, k, v = self.qkv(x).split(self.qkv.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:  # on copies, whose heads are rows of one stride
            q = self.q_norm(q.reshape(-1, self.head_dim))
            k = self.k_norm(k.reshape(-1, self.head_dim))
        q_THqD, k_THkvD, v_THkvD = (part.view(num_tokens, -1, self.head_dim) for part in (q, k, v))
        key_cache, value_cache = cache[0], cache[1]
        key_scale, value_scale = attention.scales(self.layer)
        scales: dict[str, Any] = {"key_scale": key_scale, "value_scale": value_scale}
        written = (key_cache, value_cache, attention.slot_mapping)
        if self.cos_sin is None:
            kernels.reshape_and_cache(k_THkvD, v_THkvD, *written, **scales)
        else:
            kernels.rotary_and_cache(positions, q_THqD, k_THkvD, v_THkvD, self.cos_sin, *written, **scales)
        kernels.paged_attention(
            q_THqD,
            key_cache,
            value_cache,
            attention.block_tables,
            attention.query_start_loc,
            attention.seq_lens,
            scale=self.scale,
            causal=self.causal,
            sliding_window=self.window,
            softcap=self.softcap,
            **scales,
            out=attended_THqD,
            max_query_len=attention.max_query_len,
            max_seq_len=attention.max_seq_len,
            **({"workspace": attention.workspace} if self.invariant is None else self.invariant),
        )
        return self.output(attended_THqD.view(num_tokens, -1))

    def make_batch_invariant(self) -> None:
        """Mutates: one kernel serves every row, so that a row is the same in a prompt, in a chunk of it and alone.

        The prefill kernel walks the keys of a row in tiles that begin at key 0. With a window they begin where the
        tile's first row does, so there it is the decode kernel with splits of a fixed size.
        """
        whole: dict[str, Any] = {"path": "prefill"}
        self.invariant = whole if self.window is None else {"path": "decode", "split_size": SPLIT_SIZE}

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader; query, key and value as one and apart."""
        views = {"qkv": self.qkv.parameters(), **self.qkv.parts(), "output": self.output.parameters()}
        if self.q_norm is not None and self.k_norm is not None:
            views |= {"q_norm": self.q_norm.parameters(), "k_norm": self.k_norm.parameters()}
        return views

    def matrices(self) -> list[tuple[Linear, tuple[str, ...], int | None]]:
        """Linear layers with the parts that their rows are, in order, and the expert's number, if it is one's."""
        return [(self.qkv, ("q", "k", "v"), None), (self.output, ("output",), None)]

    def linears(self) -> list[Linear]:
        """What ``pack()`` is to be called on."""
        return [self.qkv, self.output]
