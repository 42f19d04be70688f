"""Runs every op once over a few small shapes and compares it with the oracle: a program for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_ops.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_ops.py

Inputs are made and results compared on the host: the project's kernels are nearly all that the sanitizer slows down.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES, QUANTIZED_CACHE_DTYPES
from research_engine.kernels.attention import CPU_PATHS, PATHS
from research_engine.kernels.quantized import KINDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.kernels.attention_cases import NAN, TOLERANCE, make_batch

# (q_len, seq_len); some rows see nothing.
MIXED = [(1, 70), (7, 40), (1, 0), (40, 40), (1, 1), (0, 5), (5, 3), (3, 150)]

# head size, G, block size, options of paged_attention
ATTENTION_CASES: list[tuple[int, int, int, dict[str, object]]] = [
    (64, 1, 16, {}),
    (64, 3, 8, {"split_size": 64}),
    (128, 4, 16, {"split_size": 48}),
    (128, 8, 256, {"softcap": 5.0}),
    (80, 5, 1, {"sliding_window": 33, "split_size": 32}),
    (256, 2, 32, {"alibi_slopes": True, "sinks": True, "split_size": 64}),
    (46, 9, 16, {"causal": False, "split_size": 100}),
    (192, 16, 7, {"sliding_window": 1}),
    (128, 4, 16, {"cache_dtype": torch.float8_e4m3fn}),
    (64, 3, 32, {"cache_dtype": torch.int8, "split_size": 64}),
    (96, 7, 16, {"cache_dtype": torch.int8, "sliding_window": 33, "softcap": 5.0}),
    (256, 2, 1, {"cache_dtype": torch.float8_e4m3fn, "causal": False, "sinks": True}),
]


def attention(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each case on each path."""
    for head_size, group, block_size, settings in ATTENTION_CASES:
        for path in CPU_PATHS if device == "cpu" else PATHS:
            name = f"paged_attention D={head_size} G={group} B={block_size} {settings} path={path}"
            yield name, partial(check_attention, device, dtype, head_size, group, block_size, settings, path)


def check_attention(
    device: str,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    block_size: int,
    settings: dict[str, object],
    path: str,
) -> None:
    """One call over `MIXED`; out and lse as the oracle's, rows past the last request untouched."""
    settings = dict(settings)
    cache_dtype: Any = settings.pop("cache_dtype", None)
    batch = make_batch(
        MIXED, group=group, head_size=head_size, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype,
        padding_rows=2,
    )  # fmt: skip
    heads, rows = 2 * group, int(batch.query_start_loc[-1])
    options: dict[str, Any] = dict(settings, scale=head_size**-0.5, **batch.scales())
    for name, values in (("alibi_slopes", torch.linspace(0.01, 0.5, heads)), ("sinks", torch.linspace(-2, 4, heads))):
        if name in options:
            options[name] = values
    plain = {k: v for k, v in options.items() if k != "split_size"}
    expected_lse = torch.empty(batch.query.shape[:2], dtype=torch.float64)
    expected = kernels.reference.paged_attention(*batch.tensors(), lse=expected_lse, **plain)
    on_device = [tensor.to(device) for tensor in batch.tensors()]
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    out = torch.full(batch.query.shape, NAN, dtype=dtype).to(device)
    lse = torch.full(batch.query.shape[:2], NAN).to(device)
    kernels.paged_attention(*on_device, out=out, lse=lse, path=path, **options)
    same(out.cpu()[:rows], expected[:rows], dtype)
    same(lse.cpu()[:rows], expected_lse[:rows], dtype)
    assert out.cpu()[rows:].isnan().all(), "rows past the last request were written"


def same(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def compare(
    op: str, device: str, dtype: torch.dtype, tensors: list[torch.Tensor], *rest: object, **options: object
) -> None:
    """Runs an op and its oracle on copies of the same tensors; every tensor has to end up the same."""
    on_device = [tensor.to(device, copy=True) for tensor in tensors]
    on_host = [tensor.clone() for tensor in tensors]
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    result = getattr(kernels, op)(*on_device, *rest, **moved)
    expected = getattr(kernels.reference, op)(*on_host, *rest, **options)
    for actual, wanted in zip(on_device, on_host, strict=True):
        same(actual.cpu(), wanted, dtype)
    if result is not None:
        same(result.cpu(), expected, dtype)


def check_quantized(device: str, dtype: torch.dtype, kind: str, n: int, k: int, groups: int, rows: int) -> None:
    """The product and the weight as floats, with zeros, and for 4 bits with offsets."""
    if dtype == torch.float32 and device != "cpu":
        return  # no kernel
    bits = KINDS[kind].bits
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    if kind == "float8":
        codes[codes & 0x7F == 0x7F] = 0
    zeros = None if kind == "float8" else torch.randint(0, 1 << bits, (groups, n), dtype=torch.uint8)
    offsets = torch.randn(groups, n) if kind == "int4" else None
    values = codes.view(torch.float8_e4m3fn) if kind == "float8" else codes
    on_device = [None if x is None else x.to(device) for x in (values, torch.rand(groups, n), zeros, offsets)]
    weight = kernels.pack_weight(*on_device, kind=kind)  # type: ignore[arg-type]
    x = torch.randn(rows, k).to(device, dtype)
    expected = kernels.reference.quantized_matmul(x, weight)
    error = (kernels.quantized_matmul(x, weight).double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error}"
    same(kernels.dequantize_weight(weight, dtype).cpu(), kernels.reference.dequantize_weight(weight).cpu(), dtype)


def check_skinny_gemm(device: str, dtype: torch.dtype, rows: int, n: int, k: int, gated: bool) -> None:
    """With a bias, into float32; on a GPU overlapped by the call before."""
    if dtype == torch.float32 and device != "cpu":
        return  # no kernel
    x, weight, bias = torch.randn(rows, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype), torch.randn(n).to(dtype)
    expected = kernels.reference.skinny_gemm(x, weight, bias, gated=gated)
    on_device = [tensor.to(device) for tensor in (x, weight, bias)]
    for overlap in (False, True):
        out = kernels.skinny_gemm(*on_device, gated=gated, out_dtype=torch.float32, overlap=overlap)
        same(out.cpu(), expected, torch.float32)


def check_swap(device: str, dtype: torch.dtype, head_size: int) -> None:
    """Blocks from host memory to the device, and back into other host memory."""
    pinned = device != "cpu"
    pairs = torch.tensor([[1, 4], [2, 5], [3, 6], [6, 0], [0, 1]])
    host, back = (torch.zeros(3, 2, 7, 2, 5, head_size, dtype=dtype, pin_memory=pinned) for _ in range(2))
    host.copy_(torch.randn(host.shape))
    far = torch.randn(3, 2, 9, 2, 5, head_size).to(dtype)
    near = far.to(device, copy=True)
    kernels.reference.swap_blocks(host, far, pairs)
    kernels.swap_blocks(host, near, pairs)
    same(near.cpu(), far, dtype)
    kernels.swap_blocks(near, back, pairs.flip(1).contiguous())
    if pinned:
        torch.cuda.synchronize()
    same(back[:, :, pairs[:, 0]], host[:, :, pairs[:, 0]], dtype)


def check_merge(device: str, dtype: torch.dtype, states: list[torch.Tensor]) -> None:
    """Out and lse of two parts, some without keys."""
    expected = kernels.reference.merge_attention_states(*states)
    for actual, wanted in zip(kernels.merge_attention_states(*(s.to(device) for s in states)), expected, strict=True):
        same(actual.cpu(), wanted, dtype)


def check_sample(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    """Every kind of row at once, as the CPU draws them."""
    rows, width = 9, 6
    logits = torch.randn(rows, vocab_size).to(dtype if device != "cpu" or dtype in CPU_DTYPES else torch.float32)
    logits[7], logits[8, 0] = 0, NAN
    row = torch.arange(rows)
    seen = torch.stack([torch.randperm(max(vocab_size, width))[:width] for _ in range(rows)]).int()
    arguments = {
        "temperature": torch.tensor([0.0, 1.0, 1.0, 1.0, 0.7, 2.0, 1.0, 1.0, 1.0]),
        "seeds": row,
        "positions": row * 3,
        "top_k": torch.tensor([0, 0, 3, 0, 50, 0, 1500, 20, 0]).int(),
        "top_p": torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 0.9, 0.5, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
        "repetition_penalty": torch.full((rows,), 1.2),
        "presence_penalty": torch.full((rows,), 0.1),
        "frequency_penalty": torch.full((rows,), 0.1),
        "seen_tokens": seen,
        "seen_counts": torch.ones(rows, width, dtype=torch.int32),
        "seen_lengths": (row % width).int(),
        "slots": torch.tensor([0, 1, 2, 3, -1, -1, -1, 7, 8]).int(),
        "bias_tokens": seen[:, :2].contiguous(),
        "bias_values": torch.tensor([[1.5, -torch.inf]] * rows),
        "allowed_tokens": torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32))).int(),
    }
    on_host = {name: tensor.clone() for name, tensor in arguments.items()}
    on_device = {name: tensor.to(device, copy=True) for name, tensor in arguments.items()}
    wide = logits if dtype in CPU_DTYPES else logits.float()
    expected = kernels.sample(wide, **on_host, count_drawn=True, num_logprobs=5)  # type: ignore[arg-type]
    drawn = kernels.sample(logits.to(device), **on_device, count_drawn=True, num_logprobs=5)  # type: ignore[arg-type]
    for actual, wanted in zip(drawn, expected, strict=True):
        same(actual.cpu(), wanted, dtype)
    for name in ("seen_tokens", "seen_counts", "seen_lengths"):
        assert torch.equal(on_device[name].cpu(), on_host[name]), name


def others(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every op but attention, with rows of whole 16-byte vectors and without."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    def case(op: str, *arguments: object, **options: object) -> Callable[[], None]:
        return partial(compare, op, device, dtype, *arguments, **options)  # type: ignore[arg-type]

    for width in (8, 77, 576, 9000):
        x, residual, weight = random(5, width), random(5, width), random(width)
        yield f"rms_norm H={width}", case("rms_norm", [x, weight], 1e-5)
        yield f"fused_add_rms_norm H={width}", case("fused_add_rms_norm", [x, residual, weight], 1e-5)
        yield f"silu_and_mul I={width}", case("silu_and_mul", [random(5, 2 * width)])
    positions = torch.tensor([0, 3, 9, 9, 1])
    for interleaved in (False, True):
        tensors = [positions, random(5, 6, 80), random(5, 2, 80), torch.randn(10, 64)]
        yield f"rotary_embedding interleaved={interleaved}", case("rotary_embedding", tensors, interleaved=interleaved)
    for d in (64, 46):
        for cache_dtype in (dtype, *QUANTIZED_CACHE_DTYPES):
            caches = torch.zeros(2, 4, 2, 7, d, dtype=cache_dtype)
            heads = random(5, 6, d), random(5, 2, d), random(5, 2, d)
            slots = torch.tensor([-1, 27, 0, 13])
            tensors = [positions, *heads, torch.randn(10, 32), caches[0], caches[1], slots]
            scales = None if cache_dtype is dtype else torch.tensor([0.1, 0.02])
            name = f"rotary_and_cache {cache_dtype} D={d}"
            yield name, case("rotary_and_cache", tensors, key_scale=scales, value_scale=scales)
    for vocab_size in (3, 1000, 131_072):
        yield f"sample V={vocab_size}", partial(check_sample, device, dtype, vocab_size)
    for d in (64, 46):
        tensors = [random(5, 3, d), random(5, 3, d), random(4, 3, 7, d), random(4, 3, 7, d)]
        yield f"reshape_and_cache D={d}", case("reshape_and_cache", [*tensors, torch.tensor([-1, 27, 0, 13])])
        slots, scales = torch.tensor([-1, 27, 0, 13]), torch.tensor([0.1, 0.02, 3.0])
        for cache_dtype in QUANTIZED_CACHE_DTYPES:
            caches = torch.zeros(2, 4, 3, 7, d, dtype=cache_dtype)
            tensors = [random(5, 3, d), random(5, 3, d), caches[0], caches[1], slots]
            name = f"reshape_and_cache {cache_dtype} D={d}"
            yield name, case("reshape_and_cache", tensors, key_scale=scales, value_scale=scales)
        tables, start_loc = torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([0, 9, 12]).int()
        for cache_dtype in (dtype, *QUANTIZED_CACHE_DTYPES):
            caches = random(2, 4, 3, 7, d).to(cache_dtype)
            tensors = [caches[0], caches[1], tables, start_loc, random(13, 3, d), random(13, 3, d)]
            options = {} if cache_dtype is dtype else {"key_scale": scales, "value_scale": scales}
            starts = torch.tensor([2, 0]).int()
            yield f"gather_cache {cache_dtype} D={d}", case("gather_cache", tensors, starts=starts, **options)
        states = [random(5, 3, d), torch.randn(5, 3), random(5, 3, d), torch.randn(5, 3)]
        states[1][2:4], states[3][3:] = -torch.inf, -torch.inf
        yield f"merge_attention_states D={d}", partial(check_merge, device, dtype, states)
        pairs = torch.tensor([[8, 0], [3, 1], [3, 2]])
        for kind in KINDS:
            yield (
                f"quantized_matmul {kind} K={5 * d // 32 * 32}",
                partial(check_quantized, device, dtype, kind, 300, 5 * (d // 32 * 32), 5, 11),
            )
        for rows in (1, 8, 13, 30, 47, 64):
            for n, k in ((24, 8), (300, 5 * d // 8 * 8), (70, 14336), (576, 1536)):
                yield (
                    f"skinny_gemm {rows} x {n} x {k} gated={d == 46}",
                    partial(check_skinny_gemm, device, dtype, rows, n, k, d == 46),
                )
        yield f"copy_blocks D={d}", case("copy_blocks", [random(3, 2, 9, 2, 5, d), pairs])
        yield f"swap_blocks D={d}", partial(check_swap, device, dtype, d)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", action="append", help="float32, float16, bfloat16; repeatable; default: all")
    parser.add_argument("--only", default="", help="a part of the cases' names")
    arguments = parser.parse_args()
    failures = count = 0
    torch.manual_seed(0)
    for dtype in CPU_DTYPES if arguments.device == "cpu" else CUDA_DTYPES:
        if arguments.dtype and str(dtype).removeprefix("torch.") not in arguments.dtype:
            continue
        for family in (others, attention):
            for name, run in family(arguments.device, dtype):
                if arguments.only not in name:
                    continue
                count += 1
                begun = time.perf_counter()
                try:
                    run()
                    print(f"ok    {dtype} {name} ({time.perf_counter() - begun:.2f} s)", flush=True)
                except (AssertionError, RuntimeError, ValueError) as error:
                    failures += 1
                    print(f"FAIL  {dtype} {name}\n{error}", flush=True)
    print(f"{count - failures} of {count} cases right")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
