"""Runs every op once over a few small shapes and compares it with the oracle: a program for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_ops.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_ops.py

Inputs are made and results compared on the host, so that the project's kernels are nearly all that the sanitizer slows down.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES
from research_engine.kernels.attention import CPU_PATHS, PATHS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from attention_cases import NAN, TOLERANCE, make_batch

MIXED = [(1, 70), (7, 40), (1, 0), (40, 40), (1, 1), (0, 5), (5, 3), (3, 150)]  # (q_len, seq_len); some rows see nothing

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
]


def attention(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each case on each path."""
    for head_size, group, block_size, settings in ATTENTION_CASES:
        batch = make_batch(MIXED, group=group, head_size=head_size, block_size=block_size, dtype=dtype, padding_rows=2)
        heads, rows = 2 * group, int(batch.query_start_loc[-1])
        options = dict(settings)
        for name, values in (("alibi_slopes", torch.linspace(0.01, 0.5, heads)), ("sinks", torch.linspace(-2, 4, heads))):
            if options.pop(name, False):
                options[name] = values
        plain = {k: v for k, v in options.items() if k != "split_size"}
        expected_lse = torch.empty(batch.query.shape[:2], dtype=torch.float64)
        expected = kernels.reference.paged_attention(*batch.tensors(), scale=head_size**-0.5, lse=expected_lse, **plain)  # type: ignore[arg-type]
        on_device = [tensor.to(device) for tensor in batch.tensors()]
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        for path in CPU_PATHS if device == "cpu" else PATHS:

            def run(path: str = path) -> None:
                out = torch.full(batch.query.shape, NAN, dtype=dtype).to(device)
                lse = torch.full(batch.query.shape[:2], NAN).to(device)
                kernels.paged_attention(*on_device, scale=head_size**-0.5, out=out, lse=lse, path=path, **options)  # type: ignore[arg-type]
                same(out.cpu()[:rows], expected[:rows], dtype)
                same(lse.cpu()[:rows], expected_lse[:rows], dtype)
                assert out.cpu()[rows:].isnan().all(), "rows past the last request were written"

            yield f"paged_attention D={head_size} G={group} B={block_size} {settings} path={path}", run


def same(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def compare(op: str, device: str, dtype: torch.dtype, tensors: list[torch.Tensor], *rest: object, **options: object) -> None:
    """Runs an op and its oracle on copies of the same tensors; every tensor has to end up the same."""
    on_device = [tensor.to(device, copy=True) for tensor in tensors]
    on_host = [tensor.clone() for tensor in tensors]
    result = getattr(kernels, op)(*on_device, *rest, **options)
    expected = getattr(kernels.reference, op)(*on_host, *rest, **options)
    for actual, wanted in zip(on_device, on_host):
        same(actual.cpu(), wanted, dtype)
    if result is not None:
        same(result.cpu(), expected, dtype)


def others(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every op but attention, with rows of whole 16-byte vectors and without."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    for width in (8, 77, 576, 9000):
        yield f"rms_norm H={width}", lambda w=width: compare("rms_norm", device, dtype, [random(5, w), random(w)], 1e-5)  # type: ignore[misc]
        yield (
            f"fused_add_rms_norm H={width}",
            lambda w=width: compare("fused_add_rms_norm", device, dtype, [random(5, w), random(5, w), random(w)], 1e-5),  # type: ignore[misc]
        )
        yield f"silu_and_mul I={width}", lambda w=width: compare("silu_and_mul", device, dtype, [random(5, 2 * w)])  # type: ignore[misc]
    for interleaved in (False, True):
        yield (
            f"rotary_embedding interleaved={interleaved}",
            lambda i=interleaved: compare(  # type: ignore[misc]
                "rotary_embedding",
                device,
                dtype,
                [torch.tensor([0, 3, 9, 9, 1]), random(5, 6, 80), random(5, 2, 80), torch.randn(10, 64)],
                interleaved=i,
            ),
        )
    for head_size in (64, 46):
        slots = torch.tensor([-1, 27, 0, 13])
        yield (
            f"reshape_and_cache D={head_size}",
            lambda d=head_size, s=slots: compare(  # type: ignore[misc]
                "reshape_and_cache", device, dtype, [random(5, 3, d), random(5, 3, d), random(4, 3, 7, d), random(4, 3, 7, d), s]
            ),
        )
        cache, pairs = random(3, 2, 9, 2, 5, head_size), torch.tensor([[8, 0], [3, 1], [3, 2]])
        yield (
            f"copy_blocks D={head_size}",
            lambda c=cache, p=pairs: compare("copy_blocks", device, dtype, [c, p]),  # type: ignore[misc]
        )

        def swap(head_size: int = head_size) -> None:
            pairs = torch.tensor([[1, 4], [2, 5], [3, 6], [6, 0], [0, 1]])
            host = random(3, 2, 7, 2, 5, head_size)
            if device != "cpu":
                host = host.pin_memory()
            far = random(3, 2, 9, 2, 5, head_size)
            expected = far.clone()
            kernels.reference.swap_blocks(host, expected, pairs)
            near = far.to(device, copy=True)
            kernels.swap_blocks(host, near, pairs)
            same(near.cpu(), expected, dtype)
            back = torch.zeros_like(host, pin_memory=device != "cpu")
            kernels.swap_blocks(near, back, pairs.flip(1).contiguous())
            if device != "cpu":
                torch.cuda.synchronize()
            touched = pairs[:, 0]
            same(back[:, :, touched], host[:, :, touched], dtype)

        yield f"swap_blocks D={head_size}", swap


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", action="append", help="float32, float16, bfloat16; repeatable; all that the device takes")
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
