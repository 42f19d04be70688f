"""The oracle: every op once more in float64 torch, written to be obviously right. Slow, on any device.

Results come back in float64, or rounded into the tensors that are changed in place or given as `out` and `lse`.
"""

from __future__ import annotations

import itertools

import torch

from research_engine.kernels._checks import QUANTIZED_CACHE_DTYPES
from research_engine.kernels.quantized import KINDS, QuantizedWeight, unpack_weight


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kernels.rms_norm`."""
    wide = x.double()
    result = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * (weight.double() + weight_offset)
    return result if out is None else out.copy_(result)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> None:
    """See `kernels.fused_add_rms_norm`: in place, normed is the sum as rounded to residual's dtype."""
    residual.copy_(residual.double() + x.double())
    x.copy_(rms_norm(residual, weight, eps, weight_offset=weight_offset))


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.silu_and_mul`."""
    gate, up = x.double().chunk(2, dim=-1)
    result = gate * torch.sigmoid(gate) * up
    return result if out is None else out.copy_(result)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.skinny_gemm`; any number of rows."""
    result = x.double() @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    if gated:
        result = silu_and_mul(result)
    return result if out is None else out.copy_(result)


def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> None:
    """See `kernels.rotary_embedding`: in place."""
    rotary_dim = cos_sin.shape[1]
    cosines, sines = cos_sin[positions].double()[:, None, :].chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
    for heads in (query, key):
        rotated = heads[..., :rotary_dim].double()
        if interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            pairs = torch.stack((a * cosines - b * sines, b * cosines + a * sines), dim=-1)
            heads[..., :rotary_dim] = pairs.flatten(-2).to(heads.dtype)
        else:
            a, b = rotated.chunk(2, dim=-1)
            heads[..., :rotary_dim] = torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(
                heads.dtype
            )


def dequantize_weight(weight: QuantizedWeight) -> torch.Tensor:
    """See `kernels.dequantize_weight`: `[N, K]`."""
    n, group_size = weight.out_features, weight.group_size

    def wide(x: torch.Tensor) -> torch.Tensor:
        """`[G, N padded]` -> `[N, K]`"""
        return x[:, :n].double().repeat_interleave(group_size, dim=0).T

    q = unpack_weight(weight).float().double()
    zeros = KINDS[weight.kind].default_zero if weight.zeros is None else wide(weight.zeros)
    result = wide(weight.scales) * (q - zeros)
    return result if weight.offsets is None else result + wide(weight.offsets)


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.quantized_matmul`."""
    product = x.double() @ dequantize_weight(weight).T
    return product if bias is None else product + bias.double()


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `kernels.reshape_and_cache`: the caches are changed."""
    block_size = key_cache.shape[2]
    if key_cache.dtype in QUANTIZED_CACHE_DTYPES:
        key, value = _quantize(key, key_scale, key_cache.dtype), _quantize(value, value_scale, key_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token]
            value_cache[slot // block_size, :, slot % block_size] = value[token]


def rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `kernels.rotary_and_cache`: the queries and the caches are changed."""
    rotated = key.clone()
    rotary_embedding(positions, query, rotated, cos_sin, interleaved=interleaved)
    reshape_and_cache(
        rotated, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale
    )


def _quantize(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`[T, Hkv, D]` divided by its heads' scales `[Hkv]` in float32, rounded and saturated."""
    quotient = x.float() if scale is None else x.float() / scale[:, None]
    if dtype == torch.int8:
        return quotient.nan_to_num(nan=0.0).round().clamp(-127, 127).to(dtype)
    return quotient.clamp(-448, 448).to(dtype)


def _dequantize(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """`[..., Hkv, D]` of any dtype in float64, times its heads' scales `[Hkv]`."""
    wide = cache.float().double()  # torch has no direct way from float8 on every device
    return wide if scale is None else wide * scale.double()[:, None]


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    start_loc: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `kernels.gather_cache`: key and value are changed."""
    block_size, locations = key_cache.shape[2], start_loc.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(locations)):
        for row in range(begin, end):
            token = row - begin + (0 if starts is None else int(starts[request]))
            block = int(block_tables[request, token // block_size])
            key[row] = _dequantize(key_cache[block, :, token % block_size], key_scale)
            value[row] = _dequantize(value_cache[block, :, token % block_size], value_scale)


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.merge_attention_states`."""
    merged_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    finite = merged_lse.masked_fill(merged_lse == -torch.inf, 0.0)
    parts = [
        torch.where(part_lse[..., None] == -torch.inf, 0.0, part.double())
        * torch.exp(part_lse.double() - finite)[..., None]
        for part, part_lse in ((out_a, lse_a), (out_b, lse_b))
    ]
    result = parts[0] + parts[1]
    return result if out is None else out.copy_(result), merged_lse if lse is None else lse.copy_(merged_lse)


def copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `kernels.copy_blocks`: the cache is changed."""
    swap_blocks(kv_cache, kv_cache, pairs)


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `kernels.swap_blocks`: the destination is changed."""
    for source_block, destination_block in pairs.tolist():
        destination[:, :, destination_block] = source[:, :, source_block].to(destination.device)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.paged_attention`. One row at a time, which gathers the keys that it sees and no other."""
    num_tokens, num_heads, head_size = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    result = torch.zeros(num_tokens, num_heads, head_size, dtype=torch.float64, device=query.device)
    log_sums = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64, device=query.device)
    starts, lengths, tables = query_start_loc.tolist(), seq_lens.tolist(), block_tables.tolist()
    for request, length in enumerate(lengths):
        q_len = starts[request + 1] - starts[request]
        for i in range(q_len):
            position = length - q_len + i
            last = min(position, length - 1) if causal else length - 1
            first = max(0, position - sliding_window + 1) if sliding_window is not None else 0
            visible = range(first, last + 1)
            blocks = [tables[request][j // block_size] for j in visible]
            offsets = [j % block_size for j in visible]
            # [keys, Hq, D]: the keys and values that this row sees, of each query head's own KV head
            keys = _dequantize(key_cache[blocks, :, offsets], key_scale).repeat_interleave(group, dim=1)
            values = _dequantize(value_cache[blocks, :, offsets], value_scale).repeat_interleave(group, dim=1)
            row = starts[request] + i
            scores = scale * (keys * query[row].double()).sum(dim=-1)  # [keys, Hq]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distances = torch.tensor([j - position for j in visible], dtype=torch.float64, device=query.device)
                scores = scores + distances[:, None] * alibi_slopes.double()
            terms = scores if sinks is None else torch.cat((scores, sinks.double()[None]))
            if len(scores) == 0:
                log_sums[row] = -torch.inf if sinks is None else sinks.double()
                continue
            log_sums[row] = torch.logsumexp(terms, dim=0)
            weights = torch.softmax(terms, dim=0)[: len(scores)]  # [keys, Hq]
            result[row] = (weights[:, :, None] * values).sum(dim=0)
    if lse is not None:
        lse.copy_(log_sums)
    return result if out is None else out.copy_(result)


def sampling_distribution(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    seen_tokens: torch.Tensor | None = None,
    seen_counts: torch.Tensor | None = None,
    seen_lengths: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    bias_tokens: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    allowed_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `kernels.sample` draws from: float64 `[S, V]` probabilities, after penalties, mask and truncation.

    A draw of u is the token at which the running sum over ids first exceeds u. Rows without a token are 0.
    """
    num_rows, vocab_size = logits.shape
    result = torch.zeros(num_rows, vocab_size, dtype=torch.float64)
    for row in range(num_rows):
        x = logits[row].cpu().double()
        forbidden = torch.zeros(vocab_size, dtype=torch.bool)
        if bias_tokens is not None and bias_values is not None:
            for token, value in zip(bias_tokens[row].tolist(), bias_values[row].tolist(), strict=True):
                if 0 <= token < vocab_size:
                    forbidden[token] |= value == -torch.inf
                    x[token] += value if value > -torch.inf else 0.0
        slot = int(slots[row]) if slots is not None else -1
        if slot >= 0:
            assert seen_tokens is not None and seen_counts is not None and seen_lengths is not None
            assert repetition_penalty is not None and presence_penalty is not None and frequency_penalty is not None
            seen = int(seen_lengths[slot])
            for token, count in zip(seen_tokens[slot, :seen].tolist(), seen_counts[slot, :seen].tolist(), strict=True):
                if not 0 <= token < vocab_size:
                    continue
                penalty = float(repetition_penalty[row])
                x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
                if count > 0:
                    x[token] -= float(presence_penalty[row]) + float(frequency_penalty[row]) * count
        if allowed_tokens is not None:
            words = allowed_tokens[row].cpu().long()[torch.arange(vocab_size) // 32]
            forbidden |= (words >> (torch.arange(vocab_size) % 32)) & 1 == 0
        x[forbidden] = -torch.inf
        if x.max() == -torch.inf:
            continue
        if float(temperature[row]) == 0:
            result[row, int((x == x.max()).nonzero()[0])] = 1
            continue
        weights = torch.exp((x - x.max()) / float(temperature[row]))
        order = torch.sort(weights, descending=True, stable=True).indices  # ties by id
        kept = int((weights > 0).sum()) if min_p is None else int((weights >= max(float(min_p[row]), 1e-300)).sum())
        if top_k is not None and int(top_k[row]) > 0:
            kept = min(kept, int(top_k[row]))
        if top_p is not None and float(top_p[row]) < 1:
            running = weights[order[:kept]].cumsum(0)
            kept = min(kept, int((running < float(top_p[row]) * running[-1]).sum()) + 1)
        result[row, order[:kept]] = weights[order[:kept]]
        result[row] /= result[row].sum()
    return result
