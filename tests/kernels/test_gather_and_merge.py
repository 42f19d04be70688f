"""Requests read out of the cache are what was written; attention in two parts is attention over both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES, QUANTIZED_CACHE_DTYPES
from tests.kernels.attention_cases import NAN, TOLERANCE, make_batch, run

DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@property_test
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_gathered_rows_equal_the_oracle(device: str, data: st.DataObject, seed: int) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    starts = [draw(st.integers(0, length)) for length in lengths]
    dtype = draw(st.sampled_from(DTYPES[device]))
    batch = make_batch(
        [(1, length) for length in lengths],
        num_kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from((1, 46, 64, 128))),
        block_size=draw(st.sampled_from((1, 8, 16))),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from((None, *QUANTIZED_CACHE_DTYPES))),
        device=device,
        seed=seed,
    )
    rows = [length - start for length, start in zip(lengths, starts, strict=True)]
    start_loc = torch.tensor([0, *rows]).cumsum(0).int().to(device)
    _, heads, _, head_size = batch.key_cache.shape
    spare = draw(st.integers(0, 2))
    whole = torch.full((sum(rows) + spare, 2 * heads + 1, head_size), NAN, dtype=dtype, device=device)
    expected = whole.clone()
    options = {"starts": torch.tensor(starts).int().to(device), **batch.scales()}
    caches = batch.key_cache, batch.value_cache, batch.block_tables, start_loc
    kernels.gather_cache(*caches, whole[:, :heads], whole[:, heads : 2 * heads], check_values=True, **options)
    kernels.reference.gather_cache(*caches, expected[:, :heads], expected[:, heads : 2 * heads], **options)
    assert torch.equal(whole.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_k11_more_gathered_tokens_than_a_small_grid_dimension(device: str) -> None:
    cache = torch.randn(65_537, 1, 1, 4, device=device)
    tables = torch.arange(65_537, dtype=torch.int32, device=device).flip(0)[None].contiguous()
    key, value = torch.empty(2, 65_537, 1, 4, device=device)
    kernels.gather_cache(cache, cache, tables, torch.tensor([0, 65_537], dtype=torch.int32, device=device), key, value)
    assert torch.equal(key.flip(0), cache[:, :, 0]) and torch.equal(value, key)


@pytest.mark.parametrize("wild", [-1, -(2**31), 2**31 - 1, 10_000])
def test_k5_ids_after_the_last_gathered_block_are_never_followed(device: str, wild: int) -> None:
    cache = torch.randn(6, 1, 4, 8, device=device)
    tables = torch.tensor([[3, 1, wild], [5, wild, wild]], dtype=torch.int32, device=device)
    start_loc = torch.tensor([0, 8, 10], dtype=torch.int32, device=device)
    key, value = torch.full((2, 10, 1, 8), NAN, device=device)
    kernels.gather_cache(cache, -cache, tables, start_loc, key, value, check_values=True)
    assert torch.equal(key[:, 0], torch.cat((cache[3, 0], cache[1, 0], cache[5, 0, :2])))
    assert torch.equal(value, -key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_loc": [0, 3, 2]}, r"start_loc\[2\] is 2, expected at least 3"),
        ({"start_loc": [0, 3, 9]}, r"start_loc\[2\] is 9, expected at least 3 .*at most 8 \(key's rows\)"),
        ({"starts": [0, 6]}, "request 1 asks for tokens 6 to 10, expected 0 to 8"),
        ({"block_tables": [[0, 1], [2, 7]]}, r"block_tables\[1, 1\] is 7, expected 0 to 5"),
    ],
)
def test_what_cannot_be_gathered_is_named(device: str, change: dict[str, list[int]], words: str) -> None:
    cache = torch.zeros(6, 1, 4, 8, device=device)
    key = torch.zeros(8, 1, 8, device=device)
    given_ = {"block_tables": [[0, 1], [2, 3]], "start_loc": [0, 3, 8], "starts": [0, 0], **change}
    if "starts" in change:
        given_["start_loc"] = [0, 3, 7]
    tensors = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in given_.items()}
    with pytest.raises(ValueError, match=words):
        kernels.gather_cache(cache, cache, key=key, value=key.clone(), check_values=True, **tensors)


@property_test
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_two_parts_merged_equal_the_oracle(device: str, data: st.DataObject, seed: int) -> None:
    draw = data.draw
    dtype, shape = draw(st.sampled_from(DTYPES[device])), (draw(st.integers(0, 9)), draw(st.integers(1, 5)))
    head_size = draw(st.sampled_from((1, 46, 128)))
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(*shape, head_size, generator=generator).to(device, dtype) for _ in range(2)]
    lses = [torch.randn(*shape, generator=generator) * draw(st.sampled_from((1.0, 60.0))) for _ in range(2)]
    for lse in lses:
        lse[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    lses = [lse.to(device) for lse in lses]
    for part, lse in zip(outs, lses, strict=True):
        part[lse == -torch.inf] = NAN  # a part without keys counts for nothing
    expected, expected_lse = kernels.reference.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    out, lse = kernels.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    kernels.merge_attention_states(outs[0], lses[0], outs[1], lses[1], out=outs[0], lse=lses[1])
    assert torch.equal(outs[0], out) and torch.equal(lses[1], lse), "in place, the result changed"


def test_k30_two_empty_parts_stay_empty(device: str) -> None:
    out, lse = torch.full((2, 3, 8), NAN, device=device), torch.full((2, 3), -torch.inf, device=device)
    merged, merged_lse = kernels.merge_attention_states(out, lse, out, lse)
    assert (merged == 0).all() and (merged_lse == -torch.inf).all()


def test_attention_over_a_prefix_and_the_rest_is_attention_over_all(device: str) -> None:
    batch = make_batch([(1, 100), (3, 100)], block_size=16, device=device)
    whole, whole_lse = run(batch, scale=0.125, causal=False)
    parts = []
    for first, last in ((0, 48), (48, 100)):
        part = make_batch([(1, 100), (3, 100)], block_size=16, device=device)
        part.block_tables = batch.block_tables[:, first // 16 :].contiguous()
        part.seq_lens = torch.full_like(batch.seq_lens, last - first)
        parts += run(part, scale=0.125, causal=False)
    out, lse = kernels.merge_attention_states(*parts)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
