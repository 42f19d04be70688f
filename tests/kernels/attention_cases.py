"""Random mixed batches for paged attention, with NaN wherever a kernel must not look."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from research_engine import kernels

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Batch:
    """Arguments of one call."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.query_start_loc, self.seq_lens

    def scales(self) -> dict[str, torch.Tensor]:
        """Those of a quantised cache, as options of the call."""
        named = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: scale for name, scale in named.items() if scale is not None}


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    spare_columns: int = 2,
    padding_rows: int = 0,
) -> Batch:
    """A batch of (q_len, seq_len) requests in shuffled blocks.

    Unused slots and unreferenced blocks hold NaN (int8: -128, which no quantiser makes), table tails hold wild ids,
    queries are a slice of a fused qkv buffer. A quantised cache has scales that differ from head to head.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for _, length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    columns = max([*needed, 0]) + spare_columns
    tables = torch.randint(-(2**31), 2**31 - 1, (len(lengths), columns), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_size), NAN) for _ in range(2)]
    for request, (_, length) in enumerate(lengths):
        blocks = [order.pop() for _ in range(needed[request])]
        tables[request, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for column, block in enumerate(blocks):
            used = min(block_size, length - column * block_size)
            for cache in caches:
                cache[block, :, :used] = torch.randn(num_kv_heads, used, head_size, generator=generator)
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
    heads = group * num_kv_heads
    rows = int(starts[-1]) + padding_rows
    fused = torch.randn(rows, heads + 2 * num_kv_heads, head_size, generator=generator)
    scales: list[torch.Tensor | None] = [None, None]
    if cache_dtype is None:
        caches = [cache.to(dtype) for cache in caches]
    else:
        amax = 127 if cache_dtype == torch.int8 else 448
        for which, cache in enumerate(caches):
            scale = torch.linspace(4.0, 7.0 + which, num_kv_heads) / amax
            stored = cache / scale[:, None, None]
            # clamped, since torch below 2.13 makes NaN of what is beyond 448
            stored = stored.round().nan_to_num(-128) if cache_dtype == torch.int8 else stored.clamp(-448, 448)
            caches[which] = stored.to(cache_dtype)
            scales[which] = scale.to(device)
    return Batch(
        fused.to(device, dtype)[:, :heads],
        caches[0].to(device),
        caches[1].to(device),
        tables.to(device),
        starts.to(device, torch.int32),
        torch.tensor([length for _, length in lengths], dtype=torch.int32, device=device),
        *scales,
    )


def run(batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's out and lse, written over poison."""
    out = torch.full(batch.query.shape, NAN, dtype=batch.query.dtype, device=batch.query.device)
    lse = torch.full(batch.query.shape[:2], NAN, dtype=torch.float32, device=batch.query.device)
    kernels.paged_attention(*batch.tensors(), out=out, lse=lse, **batch.scales(), **options)  # type: ignore[arg-type]
    return out, lse


def check(batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the op and compares out and lse with the oracle; infinities have to be at the same places."""
    rows = int(batch.query_start_loc[-1])
    scale = options.setdefault("scale", batch.query.shape[-1] ** -0.5)
    out, lse = run(batch, **options)
    oracle_options = {
        k: v for k, v in options.items() if k in ("causal", "sliding_window", "softcap", "alibi_slopes", "sinks")
    }
    expected_lse = torch.empty_like(lse, dtype=torch.float64)
    expected = kernels.reference.paged_attention(
        *batch.tensors(), scale=scale, lse=expected_lse, **batch.scales(), **oracle_options
    )  # type: ignore[arg-type]
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(out[:rows].double(), expected[:rows], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[:rows].double(), expected_lse[:rows], rtol=tolerance, atol=tolerance)
    return out, lse
