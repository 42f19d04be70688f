"""Products with quantised weights that the kernels' benchmark times: inputs, their check, the same by other means."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from research_engine import kernels
from research_engine.bench import kernel_peers
from research_engine.bench.kernel_problems import SAMPLED_COLUMNS, TOLERANCES, Problem, Setting, Sizes, relative_error
from research_engine.bench.kernel_timing import Results, Run
from research_engine.kernels import reference
from research_engine.kernels.quantized import KINDS, QuantizedWeight, columns_of, unpack_weight


def random_weight(kind: str, n: int, k: int, group_size: int, setting: Setting) -> QuantizedWeight:
    """Elements in their whole range, with zero points where the kind has them, as AWQ's; scales of the dtype."""
    device, random = setting.device, setting.generator()
    codes = torch.randint(0, 1 << KINDS[kind].bits, (n, k), dtype=torch.uint8, device=device, generator=random)
    groups = k // group_size
    scale_dtype = torch.float32 if device.type == "cpu" or kind == "float8" else setting.dtype
    scales = (torch.rand(groups, n, device=device, generator=random) * 0.01 + 0.005).to(scale_dtype)
    if kind == "float8":
        codes &= 0xF7  # no code of NaN
        return kernels.pack_weight(codes.view(torch.float8_e4m3fn), scales, kind=kind)
    zeros = torch.randint(0, 1 << KINDS[kind].bits, scales.shape, dtype=torch.uint8, device=device, generator=random)
    return kernels.pack_weight(codes, scales, zeros, kind=kind)


def make_quantized_matmul(kind: str) -> Callable[[Sizes, Setting], Problem]:
    """A maker for weights of a kind."""

    def make(sizes: Sizes, setting: Setting) -> Problem:
        weight = random_weight(kind, sizes["N"], sizes["K"], min(sizes["group"], sizes["K"]), setting)
        x = torch.randn(
            (sizes["T"], sizes["K"]), dtype=setting.dtype, device=setting.device, generator=setting.generator()
        )
        out = torch.empty(sizes["T"], sizes["N"], dtype=setting.dtype, device=setting.device)
        size = kernels.quantized_matmul_workspace(weight, sizes["T"])
        workspace = torch.zeros(size, dtype=torch.float32, device=setting.device) if size else None
        last = min(SAMPLED_COLUMNS, sizes["N"])
        expected = reference.quantized_matmul(x, columns_of(weight, 0, last))

        def run() -> Results:
            kernels.quantized_matmul(x, weight, out=out, workspace=workspace, overlap=True)  # as a model's layers
            return (out,)

        def reset() -> None:
            out.fill_(float("nan"))

        def dequantized() -> Run:
            return lambda: (functional.linear(x, kernels.dequantize_weight(weight, setting.dtype)),)

        def dense() -> Run:
            floats = kernels.dequantize_weight(weight, setting.dtype)
            return lambda: (functional.linear(x, floats),)

        def packed() -> kernel_peers.PackedInputs:
            assert weight.zeros is not None
            scales, zeros = (part[:, : sizes["N"]].contiguous() for part in (weight.scales, weight.zeros))
            return kernel_peers.PackedInputs(x, unpack_weight(weight), scales, zeros)

        peers = {"torch": dense, "dequantised": dequantized}
        if kind == "int4" and setting.device.type == "cuda":
            peers |= {
                "Marlin": lambda: kernel_peers.marlin(packed()),
                "Machete": lambda: kernel_peers.machete(packed()),
            }
        return Problem(
            run,
            reset=reset,
            error=lambda results: relative_error(results[0][:, :last], expected),
            tolerance=TOLERANCES[setting.dtype],
            peers=peers,
        )

    return make
