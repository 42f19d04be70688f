"""Weights reach vLLM's kernels in the order that these unpack; ones that follow the formula stand in for them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from research_engine.bench import kernel_peers
from research_engine.loading.packing import unpack, unpack_awq

N, K, GROUPS = 16, 64, 2


class FakeOps(types.ModuleType):
    """Of vLLM, on weights as they were given, [K, N]."""

    def awq_marlin_repack(self, words: torch.Tensor, depth: int, columns: int, bits: int) -> torch.Tensor:
        assert (depth, columns, bits, words.shape) == (K, N, 4, (K, N // 8))
        return unpack_awq(words)

    def machete_prepack_B(self, words: torch.Tensor, **types: Any) -> torch.Tensor:
        assert words.shape == (K // 8, N) and words.stride() == (1, K // 8)
        return unpack(words.contiguous(), 4, 0)

    def marlin_gemm(
        self, x: Any, c: Any, weight: Any, bias: Any, scales: Any, *rest: Any, **sizes: Any
    ) -> torch.Tensor:
        zeros = rest[2]
        assert (sizes["size_m"], sizes["size_n"], sizes["size_k"]) == (x.shape[0], N, K)
        return x @ ((weight - spread(zeros)) * spread(scales))

    def machete_mm(self, **given: Any) -> torch.Tensor:
        assert given["b_group_size"] == K // GROUPS
        return given["a"] @ (given["b_q"] * spread(given["b_group_scales"]) + spread(given["b_group_zeros"]))


def spread(groups: torch.Tensor) -> torch.Tensor:
    """``[G, N]`` -> ``[K, N]``."""
    return groups.float().repeat_interleave(K // GROUPS, 0)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, utils, names = FakeOps("vllm._custom_ops"), types.ModuleType("marlin_utils"), types.ModuleType("scalar_type")
    utils.__dict__.update(
        marlin_permute_scales=lambda scales, *sizes: scales,
        marlin_zero_points=lambda zeros, *sizes: zeros,
        marlin_make_workspace_new=lambda device: None,
        marlin_make_empty_g_idx=lambda device: None,
    )
    names.__dict__["scalar_types"] = types.SimpleNamespace(uint4="uint4")
    layers = "vllm.model_executor.layers"
    modules: dict[str, types.ModuleType] = {
        name: types.ModuleType(name)
        for name in ("vllm", "vllm.model_executor", layers, f"{layers}.quantization", f"{layers}.quantization.utils")
    }
    modules["vllm"].__dict__["_custom_ops"] = ops
    modules[f"{layers}.quantization.utils"].__dict__["marlin_utils"] = utils
    modules |= {"vllm._custom_ops": ops, "vllm.scalar_type": names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("peer", [kernel_peers.marlin, kernel_peers.machete])
def test_the_product_is_that_of_the_weight_that_was_given(vllm: None, peer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (GROUPS, N), dtype=torch.uint8, generator=generator)
    scales, x = torch.rand(GROUPS, N, generator=generator), torch.randn(3, K, generator=generator)
    weight = (codes.T - spread(zeros)) * spread(scales)
    (out,) = peer(kernel_peers.PackedInputs(x, codes, scales, zeros))()
    torch.testing.assert_close(out, x @ weight)
