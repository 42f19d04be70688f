"""Products with weights of 4 and 8 bits an element: packing for the device, the product, the weight as floats.

A quantised weight is `W[n, k] = scales[k // g, n] * (q[n, k] - zeros[k // g, n]) + offsets[k // g, n]`, q unsigned
integers of 4 or 8 bits ("int4", "int8") or float8_e4m3fn numbers ("float8", no zeros). Every format of checkpoints is a
case of it: AWQ and GPTQ have zeros, GGUF's Q4_1 offsets, float8 weights a scale a column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from research_engine.kernels._checks import check_dtype, check_exactly, check_last_contiguous, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced


class Kind(NamedTuple):
    """How q is stored: the extension's number, bits an element, the zero that stands for none."""

    number: int
    bits: int
    default_zero: int


KINDS = {"int4": Kind(0, 4, 8), "int8": Kind(1, 8, 128), "float8": Kind(2, 8, 0)}
GROUP_MULTIPLE = 32  # of group sizes, and so of K
SCALE_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}

_CPU_COLUMNS = 32
_CUDA_COLUMNS = 128
_CUDA_DEPTH = {4: 256, 8: 128}  # by bits: of a unit
_CUDA_WORDS = 4096  # of a unit, 16 KiB


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[N, K]` in its device's layout; made by `pack_weight`.

    Attributes:
        kind: "int4", "int8" or "float8".
        out_features: N.
        in_features: K.
        weight: int32 `[tiles, ..., words]`, q in the layout of the device; N padded to whole tiles.
        scales: `[K / g, N padded]`; float32 on a CPU, also bfloat16 or float16 on CUDA.
        zeros: uint8 `[K / g, N padded]`, or None: half the range (8 or 128).
        offsets: as scales, or None: 0.
    """

    kind: str
    out_features: int
    in_features: int
    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def group_size(self) -> int:
        """Elements along K that share a scale."""
        return self.in_features // self.scales.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.weight, self.scales, self.zeros, self.offsets)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def pack_weight(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    *,
    kind: str,
) -> QuantizedWeight:
    """Lays a quantised weight out for the device it is on.

    Args:
        values: `[N, K]`: uint8 in `[0, 16)` for int4, uint8 for int8, float8_e4m3fn for float8; K a multiple of 32.
        scales: floats `[G, N]`; G divides K, and K / G is a multiple of 32.
        zeros: uint8 `[G, N]`, in q's range, or None: 8 or 128. None for float8.
        offsets: floats `[G, N]`, or None. None but for int4.
        kind: "int4", "int8" or "float8".

    Returns:
        The packed weight, its scales and offsets float32 on a CPU and unchanged on CUDA.

    Raises:
        TypeError, ValueError: a kind, dtype or shape that breaks the rules above, or a float8 value that is NaN.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; it is one of {', '.join(KINDS)}")
    expected = torch.float8_e4m3fn if kind == "float8" else torch.uint8
    if values.dtype is not expected or values.dim() != 2:
        refuse("values", values, f"{expected} [N, K] is needed for {kind}")
    n, k = values.shape
    groups = scales.shape[0]
    if scales.dim() != 2 or scales.shape[1] != n or groups == 0 or k % groups or (k // groups) % GROUP_MULTIPLE:
        refuse("scales", scales, f"[G, N] is needed with N = {n}, and K / G = {k} / G a multiple of {GROUP_MULTIPLE}")
    if zeros is not None and (kind == "float8" or zeros.dtype is not torch.uint8 or zeros.shape != scales.shape):
        refuse("zeros", zeros, f"uint8 as scales, {list(scales.shape)}, is needed, and none for float8")
    if offsets is not None and (kind != "int4" or offsets.shape != scales.shape):
        refuse("offsets", offsets, f"the shape of scales, {list(scales.shape)}, is needed, and int4 for any")
    for name, floats in (("scales", scales), ("offsets", offsets)):
        if floats is not None and floats.dtype not in SCALE_DTYPES["cuda"]:
            refuse(name, floats, "float32, bfloat16 or float16 is needed")
    codes = values.view(torch.uint8) if kind == "float8" else values
    if kind == "float8" and bool((not_numbers := codes & 0x7F == 0x7F).any()):
        row, column = not_numbers.nonzero()[0].tolist()
        raise ValueError(f"values[{row}, {column}] is NaN, one of {int(not_numbers.sum())}; weights have to be numbers")
    pack, columns = (_pack_cpu, _CPU_COLUMNS) if values.is_cpu else (_pack_cuda, _CUDA_COLUMNS)

    def padded(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is not None and x.is_cpu and x.is_floating_point():
            x = x.float()
        return None if x is None else torch.nn.functional.pad(x, (0, -n % columns)).contiguous()

    padded_scales = padded(scales)
    assert padded_scales is not None
    return QuantizedWeight(kind, n, k, pack(codes, KINDS[kind].bits), padded_scales, padded(zeros), padded(offsets))


def unpack_weight(weight: QuantizedWeight) -> torch.Tensor:
    """q again: uint8 `[N, K]`, or float8_e4m3fn for float8; `pack_weight` the other way round."""
    bits = KINDS[weight.kind].bits
    unpack = _unpack_cpu if weight.weight.is_cpu else _unpack_cuda
    codes = unpack(weight.weight, bits)[: weight.out_features, : weight.in_features].contiguous()
    return codes.view(torch.float8_e4m3fn) if weight.kind == "float8" else codes


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., 32 / bits]` -> int32 `[...]`, the first element in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return (codes.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def _elements(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[...]` -> uint8 `[..., 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)


def _pad(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % columns, 0, -codes.shape[0] % rows))


def _pack_cpu(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[N / 32, K / E, 32]`, E = 32 / bits elements along K in a word."""
    per_word = 32 // bits
    codes = _pad(codes, _CPU_COLUMNS, per_word)
    n, k = codes.shape
    out = torch.empty(n // _CPU_COLUMNS, k // per_word, _CPU_COLUMNS, dtype=torch.int32)
    for tile, rows in enumerate(codes.split(_CPU_COLUMNS)):
        out[tile] = _words(rows.view(_CPU_COLUMNS, -1, per_word), bits).T
    return out


def _unpack_cpu(words: torch.Tensor, bits: int) -> torch.Tensor:
    return _elements(words.transpose(1, 2), bits).flatten(2).flatten(0, 1)


class _Order(NamedTuple):
    """A permutation of the digits of (n, k): their names and sizes there, and their names as they lie in memory."""

    n: dict[str, int]
    k: dict[str, int]
    word: tuple[str, ...]
    element: tuple[str, ...]


# csrc/cuda/quantized_matmul.cuh says why. Slowest digit first, everywhere; "tile" and "unit" count freely.
_N_DIGITS = {"tile": 0, "warp_n": 4, "m": 2, "half": 2, "row": 8}
_CUDA_ORDERS = {
    4: _Order(
        _N_DIGITS,
        {"unit": 0, "warp_k": 2, "vector": 2, "part": 2, "quad": 4, "step": 2, "pair": 2, "side": 2},
        ("tile", "unit", "warp_k", "warp_n", "m", "vector", "row", "quad", "part", "step"),
        ("side", "pair", "half"),
    ),
    8: _Order(
        _N_DIGITS,
        {"unit": 0, "warp_k": 2, "vector": 2, "quad": 4, "step": 2, "byte": 4},
        ("tile", "unit", "warp_k", "warp_n", "m", "vector", "row", "quad", "step", "half"),
        ("byte",),
    ),
}
_CUDA_TILES_AT_ONCE = 64  # bounds the temporaries of packing


def _pack_cuda(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[N / 128, K / unit, 4096]`: a unit is 128 columns of 256 or 128 in depth, a lane's fragments side by side."""
    order = _CUDA_ORDERS[bits]
    codes = _pad(codes, _CUDA_COLUMNS, _CUDA_DEPTH[bits])
    tiles, units = codes.shape[0] // _CUDA_COLUMNS, codes.shape[1] // _CUDA_DEPTH[bits]
    names = [*order.n, *order.k]
    permutation = [names.index(name) for name in (*order.word, *order.element)]
    out = torch.empty(tiles, units, _CUDA_WORDS, dtype=torch.int32, device=codes.device)
    for first, rows in enumerate(codes.split(_CUDA_TILES_AT_ONCE * _CUDA_COLUMNS)):
        here = rows.shape[0] // _CUDA_COLUMNS
        digits = rows.view(*(order.n | {"tile": here}).values(), *(order.k | {"unit": units}).values())
        words = _words(digits.permute(permutation).reshape(here, units, _CUDA_WORDS, 32 // bits), bits)
        out[first * _CUDA_TILES_AT_ONCE :][:here] = words
    return out


def _unpack_cuda(words: torch.Tensor, bits: int) -> torch.Tensor:
    order = _CUDA_ORDERS[bits]
    sizes = order.n | order.k | {"tile": words.shape[0], "unit": words.shape[1]}
    names = [*order.word, *order.element]
    digits = _elements(words, bits).view([sizes[name] for name in names])
    codes = digits.permute([names.index(name) for name in (*order.n, *order.k)])
    return codes.reshape(words.shape[0] * _CUDA_COLUMNS, words.shape[1] * _CUDA_DEPTH[bits])


def quantized_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """`x W^T + bias` for few rows of x, bound by reading the packed weight. Sums are float32, scales applied to them.

    A row's result does not depend on the other rows. For many rows (some 64 on) `dequantize_weight` and torch's product
    are faster.

    Args:
        x: `[T, K]`, rows contiguous at any stride; on CUDA bfloat16 or float16, its rows aligned to 16 bytes.
        weight: on x's device.
        bias: `[N]`, of x's dtype.
        out: `[T, N]`, rows contiguous at any stride, of x's dtype; made when None.
        workspace: CUDA only: float32, contiguous, for partial sums, of `quantized_matmul_workspace(...)` elements, zero
            before its first use and then left to these calls, one stream's at a time. Made and kept when None.
        overlap: CUDA (sm_90 on): the kernel may begin to read the weight before kernels ahead of it in the stream have
            ended, which hides the launch. Only for a weight that none of them writes: a constant. Results are the same.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from x's.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if x.dim() == 2 and x.shape[1] != weight.in_features:  # the padded layout alone would not tell
        refuse("x", x, f"[T, K] = [T, {weight.in_features}] is needed, as packed")
    if out is None:
        out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    elif x.dim() == 2 and out.shape != (x.shape[0], weight.out_features):
        refuse("out", out, f"the shape has to be [T, N] = {[x.shape[0], weight.out_features]}, as packed")
    arguments = (
        x, weight.weight, weight.scales, weight.zeros, weight.offsets, bias, out, workspace, weight.kind, overlap,
    )  # fmt: skip
    if traced(x):
        torch.ops.research_engine.quantized_matmul(*arguments)
    else:
        _quantized_matmul(*arguments)
    return out


def quantized_matmul_workspace(weight: QuantizedWeight, num_rows: int) -> int:
    """How many float32 elements `quantized_matmul` uses as `workspace` for so many rows of x; 0 on the CPU."""
    if weight.weight.is_cpu:
        return 0
    stream_of(weight.weight)
    return _C.quantized_matmul_workspace(
        KINDS[weight.kind].number, num_rows, weight.scales.shape[1], weight.in_features, weight.weight.get_device()
    )


def dequantize_weight(
    weight: QuantizedWeight, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight as floats, computed in float32 and rounded once.

    Args:
        weight: packed.
        dtype: of the result, when `out` is None.
        out: `[N, K]`, rows contiguous at any stride.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if out is None:
        out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.weight.device)
    elif out.shape != (weight.out_features, weight.in_features):
        refuse("out", out, f"the shape has to be [N, K] = {[weight.out_features, weight.in_features]}, as packed")
    arguments = (weight.weight, weight.scales, weight.zeros, weight.offsets, out, weight.kind)
    if traced(weight.weight):
        torch.ops.research_engine.dequantize_weight(*arguments)
    else:
        _dequantize_weight(*arguments)
    return out


def columns_of(weight: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """Columns `[first, last)` of the output, q as a view; both multiples of a tile (128 on CUDA, 32), or the end."""
    tile = _CPU_COLUMNS if weight.weight.is_cpu else _CUDA_COLUMNS
    if first % tile or (last % tile and last != weight.out_features) or not 0 <= first < last <= weight.out_features:
        raise ValueError(f"columns {first} to {last} of {weight.out_features}: both have to be multiples of {tile}")
    tiles = slice(first // tile, -(-last // tile))
    columns = slice(tiles.start * tile, tiles.stop * tile)

    def part(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, columns].contiguous()

    scales = part(weight.scales)
    assert scales is not None
    return replace(
        weight, out_features=last - first, weight=weight.weight[tiles], scales=scales, zeros=part(weight.zeros),
        offsets=part(weight.offsets),
    )  # fmt: skip


def _check_weight(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    n: int,
    k: int,
    kind: str,
) -> int:
    """The group size, if everything fits."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; it is one of {', '.join(KINDS)}")
    bits, cpu = KINDS[kind].bits, weight.is_cpu
    columns = _CPU_COLUMNS if cpu else _CUDA_COLUMNS
    tiles = -(-n // columns)
    tail = (k * bits // 32, columns) if cpu else (-(-k // _CUDA_DEPTH[bits]), _CUDA_WORDS)
    check_exactly("weight", weight, torch.int32, (tiles, *tail), "that of pack_weight")
    groups = scales.shape[0]
    if scales.dim() != 2 or groups == 0 or k % groups or k // groups % GROUP_MULTIPLE:
        refuse("scales", scales, f"it has to be [G, N padded], K / G = {k} / G a multiple of {GROUP_MULTIPLE}")
    valid = SCALE_DTYPES["cpu" if cpu else "cuda"]
    if scales.dtype not in valid:
        raise TypeError(f"scales: {scales.dtype} on {scales.device}; {', '.join(map(str, valid))} are taken there")
    check_exactly("scales", scales, scales.dtype, (groups, tiles * columns), "[G, N padded]")
    if zeros is not None:
        check_exactly("zeros", zeros, torch.uint8, scales.shape, "scales'")
    if offsets is not None:
        check_exactly("offsets", offsets, scales.dtype, scales.shape, "scales'")
    return k // groups


def _check_quantized_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    kind: str,
    overlap: bool,
) -> None:
    dtype = check_dtype("x", x)
    if x.dim() != 2 or x.shape[1] == 0:
        refuse("x", x, "the shape has to be [T, K] with K > 0")
    check_last_contiguous("x", x)
    if out.dim() != 2:
        refuse("out", out, "the shape has to be [T, N]")
    check_rows("out", out, dtype, (x.shape[0], out.shape[1]), "[T, N]")
    _check_weight(weight, scales, zeros, offsets, out.shape[1], x.shape[1], kind)
    if bias is not None:
        check_exactly("bias", bias, dtype, (out.shape[1],), "[N]")
    if x.is_cpu:
        if workspace is not None:
            refuse("workspace", workspace, "the CPU kernel takes none; leave it out")
        return
    if dtype is torch.float32:
        raise TypeError("x: torch.float32 on a GPU; the kernel there takes torch.bfloat16 and torch.float16")
    if x.stride(0) % 8 and x.shape[0] > 1:
        refuse("x", x, "rows have to be aligned to 16 bytes")
    if workspace is not None and (workspace.dtype != torch.float32 or not workspace.is_contiguous()):
        refuse("workspace", workspace, "it has to be float32 and contiguous")


_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


def _own_workspace(size: int, device: torch.device, stream: int) -> torch.Tensor:
    """Zeros of at least `size` elements, kept for the stream: its calls follow each other and may share them."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.float32, device=device)  # belongs to the graph, zeroed at every replay
    kept = _workspaces.get((device, stream))
    if kept is None or kept.numel() < size:
        kept = _workspaces[device, stream] = torch.zeros(size, dtype=torch.float32, device=device)
    return kept


def _quantized_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    kind: str,
    overlap: bool,
) -> None:
    _check_quantized_matmul(x, weight, scales, zeros, offsets, bias, out, workspace, kind, overlap)
    stream, number = stream_of(x), KINDS[kind].number
    if workspace is None and not x.is_cpu:
        size = _C.quantized_matmul_workspace(number, x.shape[0], scales.shape[1], x.shape[1], x.get_device())
        workspace = _own_workspace(size, x.device, stream)
    group_size = x.shape[1] // scales.shape[0]
    _C.quantized_matmul(x, weight, scales, zeros, offsets, bias, out, workspace, number, group_size, overlap, stream)


def _check_dequantize_weight(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    out: torch.Tensor,
    kind: str,
) -> None:
    check_dtype("out", out)
    if out.dim() != 2:
        refuse("out", out, "the shape has to be [N, K]")
    check_last_contiguous("out", out)
    _check_weight(weight, scales, zeros, offsets, out.shape[0], out.shape[1], kind)


def _dequantize_weight(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    offsets: torch.Tensor | None,
    out: torch.Tensor,
    kind: str,
) -> None:
    _check_dequantize_weight(weight, scales, zeros, offsets, out, kind)
    group_size = out.shape[1] // scales.shape[0]
    _C.dequantize_weight(weight, scales, zeros, offsets, out, KINDS[kind].number, group_size, stream_of(out))


_quantized_matmul_op = torch.library.custom_op(
    "research_engine::quantized_matmul",
    _quantized_matmul,
    mutates_args=("out", "workspace"),
    schema=(
        "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? bias, Tensor(a!) out, "
        "Tensor(b!)? workspace, str kind, bool overlap) -> ()"
    ),
)
_quantized_matmul_op.register_fake(_check_quantized_matmul)

_dequantize_weight_op = torch.library.custom_op(
    "research_engine::dequantize_weight",
    _dequantize_weight,
    mutates_args=("out",),
    schema="(Tensor weight, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor(a!) out, str kind) -> ()",
)
_dequantize_weight_op.register_fake(_check_dequantize_weight)
