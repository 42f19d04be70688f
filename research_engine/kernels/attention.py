"""Paged attention over a mixed batch of decode and prefill rows."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import (
    QUANTIZED_CACHE_DTYPES,
    check_dtype,
    check_exactly,
    check_last_contiguous,
    check_rows,
    check_scales,
    check_tiles,
    refuse,
)
from research_engine.kernels._extension import _C, check_scale_values, host, stream_of, traced
from research_engine.kernels.jit.variants import Launch, is_variant, launch_of, parse_path

PATHS = {"auto": 0, "simple": 1, "decode": 2, "prefill": 3, "decode_fma": 4, "prefill_fma": 5, "prefill_mma": 6}
CPU_PATHS = ("auto", "decode", "prefill")


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
    path: str = "auto",
    split_size: int | None = None,
    workspace: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    check_values: bool = False,
) -> torch.Tensor:
    """Attention of R requests' queries over keys and values in a paged cache (Kwon et al., 2309.06180).

    Row i of a request with `q_len` queries and `seq_len` keys is at position `p = seq_len - q_len + i`. Its score with
    key j is `s = scale * q . k`, then `softcap * tanh(s / softcap)`, then `+ slope * (j - p)`; it sees `j <= p`
    (causal) and `j > p - sliding_window`. A row that sees nothing gives 0, and lse -inf. Grouped heads: query head h
    reads KV head `h // G`.

    Args:
        query: `[T, Hq, D]`, last dimension contiguous.
        key_cache: `[N, Hkv, B, D]`, (block, head) tiles contiguous, of query's dtype, float8_e4m3fn or int8; Hq is a
            multiple G of Hkv. An element of a quantised cache stands for itself times `key_scale[head]`.
        value_cache: likewise, of key_cache's dtype.
        block_tables: int32 `[R, max_blocks]`, rows contiguous: block of keys `[c * B, (c + 1) * B)` in column c.
            Columns that no visible key needs may hold anything.
        query_start_loc: int32 `[R + 1]`, contiguous: request r has rows `[query_start_loc[r], query_start_loc[r +
            1])`. Rows of `query` past the last are padding; those of `out` stay as they are.
        seq_lens: int32 `[R]`, contiguous: keys of a request, this step's included; at most `max_blocks * B`.
        scale: factor of the products, usually `D ** -0.5`.
        causal: a row sees no key after its own.
        sliding_window: how many keys a row sees at most, its own included; None for all.
        softcap: limit of the scores' magnitude; None for none.
        alibi_slopes: float32 `[Hq]` (Press et al., 2108.12409).
        sinks: float32 `[Hq]`: each adds `exp(sink)` to its head's denominators (Xiao et al., 2309.17453).
        key_scale: float32 `[Hkv]`, contiguous, positive: of the heads of a quantised key cache; None for 1.
        value_scale: likewise.
        out: `[T, Hq, D]`, last dimension contiguous, of query's dtype; made when None.
        lse: float32 `[T, Hq]`, contiguous: takes the logarithms of the denominators, sinks included.
        path: "auto" picks a kernel for each request; "decode" and "prefill" force one. On CUDA also "simple", and
            "decode_fma" and "prefill_fma" (those without tensor cores), "prefill_mma" (the prefill kernel on mma.sync
            where the arguments suit it, on Hopper too), and "decode[stages=3]" and the like: a variant of the kernel
            on tensor cores, which its first call compiles (`kernels.jit`; not while a graph is captured).
        split_size: keys that one decode item takes. Given, a row's result is bitwise the same whatever the batch
            around it; None chooses it by the batch, for speed.
        workspace: CUDA only: float32, contiguous, memory for split partials, of `paged_attention_workspace(...)`
            elements, zero before its first use and then left to these calls, one stream's at a time. Smaller, a row is
            split less (an error with split_size). Made and kept when None.
        max_query_len, max_seq_len: upper bounds over the batch, which a CUDA launch is sized by; None takes T and
            `max_blocks * B`.
        check_values: check the values of tables, starts, lengths and cache scales of a CUDA call too, which waits for
            the device. Those of a CPU call always are.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from query's.
        ValueError: a shape, stride, device, path or value that breaks the rules above.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arguments = (
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out, lse, alibi_slopes, sinks,
        key_scale, value_scale, workspace, scale, causal, sliding_window, softcap, path, split_size, max_query_len,
        max_seq_len,
    )  # fmt: skip
    if traced(query):
        torch.ops.research_engine.paged_attention(*arguments)
        return out
    if check_values:
        _check(*arguments)
        _C.check_paged_attention(
            query, key_cache, host(block_tables), host(query_start_loc), host(seq_lens), sliding_window or 0,
            max_query_len or 0, max_seq_len or 0,
        )  # fmt: skip
        check_scale_values(key_scale, value_scale)
    _paged_attention(*arguments)
    return out


def paged_attention_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    path: str = "auto",
    split_size: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> int:
    """How many float32 elements `paged_attention` uses as `workspace` for arguments of these shapes; 0 on the CPU.

    It grows with the rows and requests alone, not with what the tensors hold, so one made for the largest batch serves
    all.
    """
    if query.is_cpu:
        return 0
    stream_of(query)
    path, variant = _kernel(path, query, key_cache, scored=False)  # both kernels of a variant size it alike
    return _C.paged_attention_workspace(
        query, key_cache, block_tables, PATHS[path], split_size or 0, max_query_len or query.shape[0],
        max_seq_len or block_tables.shape[1] * key_cache.shape[2], variant,
    )  # fmt: skip


def _kernel(path: str, query: torch.Tensor, key_cache: torch.Tensor, scored: bool) -> tuple[str, Launch | None]:
    """The path's name in PATHS, and for a variant what to launch in place of its kernel."""
    if not is_variant(path):
        return path, None
    variant = parse_path(path)
    group_size = query.shape[1] // key_cache.shape[1]
    scored = scored and variant.base == "prefill"  # the decode kernel is one for all
    problem = query.get_device(), key_cache.dtype, query.shape[2], group_size, scored
    return variant.base, launch_of(variant, variant.version, *problem)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    path: str,
    split_size: int | None,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> None:
    dtype = check_dtype("query", query)
    shape = query.shape
    if len(shape) != 3 or shape[2] == 0:
        refuse("query", query, "the shape has to be [T, Hq, D] with D > 0")
    if query.stride(2) != 1:
        check_last_contiguous("query", query)
    cache_shape = key_cache.shape
    cache_dtype = key_cache.dtype
    if (
        len(cache_shape) != 4
        or cache_shape[3] != shape[2]
        or (cache_dtype is not dtype and cache_dtype not in QUANTIZED_CACHE_DTYPES)
    ):
        rule = f"it has to be [N, Hkv, B, D] with D = {shape[2]}, of query's dtype {dtype}, float8_e4m3fn or int8"
        refuse("key_cache", key_cache, rule)
    if cache_shape[1] == 0 or shape[1] % cache_shape[1]:
        refuse("query", query, f"Hq = {shape[1]} has to be a multiple of Hkv = {cache_shape[1]} (key_cache's)")
    if value_cache.shape != cache_shape or value_cache.dtype is not cache_dtype:
        refuse("value_cache", value_cache, f"it has to be as key_cache, {list(cache_shape)} of {key_cache.dtype}")
    check_tiles("key_cache", key_cache)
    if value_cache.stride() != key_cache.stride():
        check_tiles("value_cache", value_cache)
    check_rows("out", out, dtype, shape, "query's, [T, Hq, D]")
    if block_tables.dtype is not torch.int32 or block_tables.dim() != 2:
        refuse("block_tables", block_tables, "it has to be int32 [R, max_blocks]")
    if block_tables.stride(1) != 1:
        check_last_contiguous("block_tables", block_tables)
    requests = block_tables.shape[0]
    check_exactly("seq_lens", seq_lens, torch.int32, (requests,), "[R]")
    check_exactly("query_start_loc", query_start_loc, torch.int32, (requests + 1,), "[R + 1]")
    if lse is not None or alibi_slopes is not None or sinks is not None or workspace is not None:
        _check_optional_tensors(query, lse, alibi_slopes, sinks, workspace)
    if key_scale is not None or value_scale is not None:
        check_scales(key_cache, cache_shape[1], key_scale, value_scale)
    if is_variant(path):
        parse_path(path)
        if query.is_cpu:
            raise ValueError(f"path={path!r}; variants are compiled for CUDA devices, and query is on {query.device}")
    elif path not in PATHS or (path not in CPU_PATHS and query.is_cpu):
        valid = ", ".join(CPU_PATHS if query.is_cpu else PATHS)
        raise ValueError(f"path={path!r}; on {query.device} it is one of {valid}")
    if (
        (sliding_window is not None and sliding_window <= 0)
        or (split_size is not None and split_size <= 0)
        or (max_query_len is not None and max_query_len <= 0)
        or (max_seq_len is not None and max_seq_len <= 0)
        or (softcap is not None and not softcap > 0)
    ):
        _refuse_numbers(
            sliding_window=sliding_window,
            softcap=softcap,
            split_size=split_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )


def _check_optional_tensors(
    query: torch.Tensor,
    lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    tokens, heads = query.shape[:2]
    if lse is not None:
        check_rows("lse", lse, torch.float32, (tokens, heads), "[T, Hq]")
        if not lse.is_contiguous():
            refuse("lse", lse, "it has to be contiguous")
    if alibi_slopes is not None:
        check_rows("alibi_slopes", alibi_slopes, torch.float32, (heads,), "[Hq]")
    if sinks is not None:
        check_rows("sinks", sinks, torch.float32, (heads,), "[Hq]")
    if workspace is not None:
        if query.is_cpu:
            refuse("workspace", workspace, "the CPU kernels keep their own; leave it out")
        if workspace.dtype != torch.float32 or not workspace.is_contiguous():
            refuse("workspace", workspace, "it has to be float32 and contiguous")


def _refuse_numbers(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name}={number}; it has to be positive, or None")


def _paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    path: str,
    split_size: int | None,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> None:
    _check(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out, lse, alibi_slopes, sinks,
        key_scale, value_scale, workspace, scale, causal, sliding_window, softcap, path, split_size, max_query_len,
        max_seq_len,
    )  # fmt: skip
    stream = stream_of(query)
    if workspace is None and not query.is_cpu:
        size = paged_attention_workspace(
            query,
            key_cache,
            block_tables,
            path=path,
            split_size=split_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        workspace = _own_workspace(size, query.device, stream) if size else None
    scored = softcap is not None or alibi_slopes is not None or scale <= 0
    path, variant = _kernel(path, query, key_cache, scored)
    _C.paged_attention(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, out, lse, alibi_slopes, sinks,
        key_scale, value_scale, workspace, scale, causal, sliding_window or 0, softcap or 0.0,
        max_query_len or query.shape[0], max_seq_len or block_tables.shape[1] * key_cache.shape[2], PATHS[path],
        split_size or 0, variant, stream,
    )  # fmt: skip


_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


def _own_workspace(size: int, device: torch.device, stream: int) -> torch.Tensor:
    """Zeros of at least `size` elements, kept for the stream: its calls follow each other and may share them."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.float32, device=device)  # belongs to the graph, zeroed at every replay
    kept = _workspaces.get((device, stream))
    if kept is None or kept.numel() < size:
        kept = _workspaces[device, stream] = torch.zeros(size, dtype=torch.float32, device=device)
    return kept


_paged_attention_op = torch.library.custom_op(
    "research_engine::paged_attention",
    _paged_attention,
    mutates_args=("out", "lse", "workspace"),
    schema=(
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor query_start_loc, "
        "Tensor seq_lens, Tensor(a!) out, Tensor(b!)? lse, Tensor? alibi_slopes, Tensor? sinks, Tensor? key_scale, "
        "Tensor? value_scale, Tensor(c!)? workspace, float scale, bool causal, int? sliding_window, float? softcap, "
        "str path, int? split_size, int? max_query_len, int? max_seq_len) -> ()"
    ),
)
_paged_attention_op.register_fake(_check)
