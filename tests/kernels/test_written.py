"""A tensor that an op writes gives each element a place of its own; one that overlaps itself is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from research_engine import kernels
from tests.kernels.attention_cases import make_batch
from tests.kernels.test_quantized import DTYPES, random_weight


def same_rows(x: torch.Tensor) -> torch.Tensor:
    """x's first row at the place of each row."""
    return x[:1].expand(x.shape)


def shifted_rows(x: torch.Tensor) -> torch.Tensor:
    """As x, but each row begins eight elements before the last one ends, at aligned places still."""
    return x.new_zeros(x.numel()).as_strided(x.shape, (x[0].numel() - 8, *x.stride()[1:]))


def paged_attention(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    batch = make_batch([(1, 20), (5, 9)], block_size=8, spare_columns=0, device=device)
    kernels.paged_attention(*batch.tensors(), scale=0.1, out=alias(torch.empty_like(batch.query)))


def rms_norm(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    x = torch.randn(3, 16, device=device)
    kernels.rms_norm(x, torch.ones(16, device=device), 1e-5, out=alias(torch.empty_like(x)))


def fused_add_rms_norm(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    tensors = {"x": torch.randn(3, 16, device=device), "residual": torch.randn(3, 16, device=device)}
    tensors[name] = alias(tensors[name])
    kernels.fused_add_rms_norm(tensors["x"], tensors["residual"], torch.ones(16, device=device), 1e-5)


def rotary_embedding(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    tensors = {"query": torch.randn(3, 4, 16, device=device), "key": torch.randn(3, 2, 16, device=device)}
    tensors[name] = alias(tensors[name])
    positions = torch.arange(3, device=device)
    kernels.rotary_embedding(positions, tensors["query"], tensors["key"], torch.randn(5, 16, device=device))


def reshape_and_cache(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    caches = {name: torch.zeros(4, 2, 8, 16, device=device) for name in ("key_cache", "value_cache")}
    caches[name] = alias(caches[name])
    key, slots = torch.randn(3, 2, 16, device=device), torch.tensor([3, -1, 30], device=device)
    kernels.reshape_and_cache(key, key.clone(), caches["key_cache"], caches["value_cache"], slots)


def gather_cache(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    cache = torch.randn(4, 2, 8, 16, device=device)
    outputs = {name: torch.empty(5, 2, 16, device=device) for name in ("key", "value")}
    outputs[name] = alias(outputs[name])
    tables = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    start_loc = torch.tensor([0, 5], dtype=torch.int32, device=device)
    kernels.gather_cache(cache, cache, tables, start_loc, outputs["key"], outputs["value"])


def merge_attention_states(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    part, lse = torch.randn(3, 4, 16, device=device), torch.randn(3, 4, device=device)
    kernels.merge_attention_states(part, lse, part, lse, out=alias(torch.empty_like(part)))


def silu_and_mul(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    x = torch.randn(3, 32, device=device)
    kernels.silu_and_mul(x, out=alias(x.new_empty(3, 16)))


def skinny_gemm(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    x = torch.randn(3, 64, device=device).bfloat16()
    kernels.skinny_gemm(x, torch.randn(32, 64, device=device).bfloat16(), out=alias(x.new_empty(3, 32)))


def quantized_matmul(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    x = torch.randn(3, 64, device=device).to(DTYPES[device][0])
    kernels.quantized_matmul(x, random_weight("int4", 70, 64, 32, device=device), out=alias(x.new_empty(3, 70)))


def dequantize_weight(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    out = torch.empty(70, 64, device=device, dtype=DTYPES[device][0])
    kernels.dequantize_weight(random_weight("int4", 70, 64, 32, device=device), out=alias(out))


def sample(device: str, alias: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    slots = torch.zeros(3, 16, dtype=torch.int32, device=device)
    ones = torch.ones(3, device=device)
    kernels.sample(
        torch.randn(3, 50, device=device), ones, torch.arange(3, device=device), torch.arange(3, device=device),
        repetition_penalty=ones, presence_penalty=ones, frequency_penalty=ones, seen_tokens=alias(slots),
        seen_counts=alias(slots), seen_lengths=slots[:, 0].contiguous(),
        slots=torch.arange(3, dtype=torch.int32, device=device), count_drawn=True,
    )  # fmt: skip


CALLS = [
    (paged_attention, "out"),
    (rms_norm, "out"),
    (fused_add_rms_norm, "x"),
    (fused_add_rms_norm, "residual"),
    (rotary_embedding, "query"),
    (rotary_embedding, "key"),
    (reshape_and_cache, "key_cache"),
    (reshape_and_cache, "value_cache"),
    (gather_cache, "key"),
    (gather_cache, "value"),
    (merge_attention_states, "out"),
    (silu_and_mul, "out"),
    (skinny_gemm, "out"),
    (quantized_matmul, "out"),
    (dequantize_weight, "out"),
    (sample, "seen_tokens"),
]


@pytest.mark.parametrize("alias", [same_rows, shifted_rows])
@pytest.mark.parametrize(("call", "name"), CALLS, ids=[f"{call.__name__}-{name}" for call, name in CALLS])
def test_a_written_tensor_that_overlaps_itself_is_refused(
    device: str, call: Callable[..., None], name: str, alias: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    call(device, lambda x: x, name)  # the call itself is right
    with pytest.raises(ValueError, match=rf"^{name}: shape \[.*elements share memory, but it is written"):
        call(device, alias, name)


def test_rows_of_a_wider_tensor_are_fine(device: str) -> None:
    x, wide = torch.randn(3, 16, device=device), torch.zeros(3, 40, device=device)
    kernels.rms_norm(x, torch.ones(16, device=device), 1e-5, out=wide[:, 8:24])
    assert torch.equal(wide[:, 8:24], kernels.rms_norm(x, torch.ones(16, device=device), 1e-5))
    assert not wide[:, :8].any() and not wide[:, 24:].any()


def test_tensors_of_one_row_or_none_have_any_stride(device: str) -> None:
    weight = torch.ones(16, device=device)
    one = torch.empty(16, device=device).as_strided((1, 16), (0, 1))
    assert kernels.rms_norm(torch.ones(1, 16, device=device), weight, 1e-5, out=one).isfinite().all()
    none = torch.empty(16, device=device).as_strided((0, 16), (0, 1))
    assert kernels.rms_norm(torch.ones(0, 16, device=device), weight, 1e-5, out=none).shape == (0, 16)
