"""Every op is a well-behaved torch operator, and the module says what it was built with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from research_engine import kernels
from research_engine.kernels.build_info import openmp_runtimes
from tests.kernels.attention_cases import make_batch

ops = torch.ops.research_engine


def arguments(name: str, device: str) -> tuple[object, ...]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    pairs = torch.tensor([(0, 1), (2, 3)])
    if name == "rms_norm":
        return randn(3, 16), randn(16), randn(3, 16), 1e-5, 1.0
    if name == "fused_add_rms_norm":
        return randn(3, 16), randn(3, 16), randn(16), 1e-5, 1.0
    if name == "silu_and_mul":
        return randn(3, 16), randn(3, 8)
    if name == "rotary_embedding":
        return torch.arange(3, device=device), randn(3, 4, 16), randn(3, 2, 16), randn(5, 16), False
    if name == "reshape_and_cache":
        return (
            randn(3, 2, 16),
            randn(3, 2, 16),
            randn(4, 2, 8, 16),
            randn(4, 2, 8, 16),
            torch.tensor([3, -1, 30], device=device),
            None,
            None,
        )
    if name == "rotary_and_cache":
        rotated = torch.arange(3, device=device), randn(3, 4, 16), randn(3, 2, 16), randn(3, 2, 16), randn(5, 16)
        return (
            *rotated,
            randn(4, 2, 8, 16),
            randn(4, 2, 8, 16),
            torch.tensor([3, -1, 30], device=device),
            False,
            None,
            None,
        )
    if name == "skinny_gemm":
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return *(randn(*shape).to(dtype) for shape in ((3, 16), (8, 16), (8,), (3, 4))), True, False
    if name in ("quantized_matmul", "dequantize_weight"):
        w = kernels.pack_weight(
            torch.zeros(40, 64, dtype=torch.uint8, device=device), torch.ones(2, 40, device=device), kind="int4"
        )
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        if name == "dequantize_weight":
            return w.weight, w.scales, None, None, torch.empty(40, 64, dtype=dtype, device=device), "int4"
        x, out = randn(3, 64).to(dtype), torch.empty(3, 40, dtype=dtype, device=device)
        return x, w.weight, w.scales, None, None, randn(40).to(dtype), out, None, "int4", False
    if name == "gather_cache":
        tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32, device=device)
        start_loc = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        caches = randn(4, 2, 8, 16), randn(4, 2, 8, 16)
        return *caches, tables, start_loc, randn(3, 2, 16), randn(3, 2, 16), None, None, None
    if name == "merge_attention_states":
        return randn(3, 2, 16), randn(3, 2), randn(3, 2, 16), randn(3, 2), randn(3, 2, 16), randn(3, 2)
    if name == "copy_blocks":
        return randn(2, 2, 4, 2, 8, 16), pairs
    if name == "swap_blocks":
        host = torch.randn(2, 2, 4, 2, 8, 16)
        return randn(2, 2, 4, 2, 8, 16), host if device == "cpu" else host.pin_memory(), pairs
    if name == "sample":
        columns = torch.ones(3, device=device), torch.arange(3, device=device), torch.arange(3, device=device)
        token_ids = torch.empty(3, dtype=torch.int64, device=device)
        return randn(3, 40), *columns, *[None] * 10, False, *[None] * 4, token_ids, *[None] * 5
    batch = make_batch([(1, 20), (5, 9)], device=device)
    lse = torch.empty(batch.query.shape[:2], device=device)
    options = (None, None, None, None, None, 0.1, True, None, 5.0, "auto", None, None, None)
    return (*batch.tensors(), torch.empty_like(batch.query), lse, *options)


ROWWISE = ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding", "rotary_and_cache"]
PRODUCTS = ["skinny_gemm", "quantized_matmul", "dequantize_weight"]
CACHE = ["reshape_and_cache", "gather_cache", "copy_blocks", "swap_blocks"]
NAMES = [*ROWWISE, *PRODUCTS, *CACHE, "merge_attention_states", "sample", "paged_attention"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device: str, name: str) -> None:
    if (name, device) == ("swap_blocks", "cuda"):
        pytest.skip("opcheck clones the host's cache into memory that is not pinned, which the op refuses")
    torch.library.opcheck(getattr(ops, name).default, arguments(name, device))


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_pass_without_running_and_are_checked(name: str) -> None:
    real = arguments(name, "cpu")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in real]
        getattr(ops, name)(*fakes)
        fakes[0] = fakes[0][0]  # one dimension less
        with pytest.raises(ValueError, match="shape"):
            getattr(ops, name)(*fakes)


def test_the_front_traces_into_one_graph(device: str) -> None:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, residual = x.clone(), residual.clone()
        kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
        return kernels.silu_and_mul(kernels.rms_norm(x, weight, 1e-5)) + residual[:, :8]

    inputs = [torch.randn(*shape, device=device) for shape in ((3, 16), (3, 16), (16,))]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), block(*inputs))


def test_one_openmp_runtime_in_the_process() -> None:
    kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
    assert len(openmp_runtimes()) <= 1, "torch and the extension would fight for the cores"


def test_the_extension_imports_without_torch() -> None:
    code = "import sys, research_engine._C as c; assert 'torch' not in sys.modules; assert c.num_threads() > 0"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_without_torch() -> None:
    code = "import sys, research_engine; assert 'torch' not in sys.modules; assert 'kernels' in dir(research_engine)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_build_info_names_compiler_and_flags() -> None:
    info = kernels.build_info()
    assert info["built"] and info["compiler"] and "-O3" in info["cpu_flags"]
    assert bool(info["cuda_archs"]) == info["built_with_cuda"]
    assert all(isinstance(problem, str) for problem in info["problems"])
