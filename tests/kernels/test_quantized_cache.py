"""Caches of float8 and int8: what is written are the bytes of the rule, what is read is stored * scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES, QUANTIZED_CACHE_DTYPES
from tests.kernels.attention_cases import NAN, check, make_batch, run

DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
FLOAT8 = torch.float8_e4m3fn
PATHS = ("auto", "decode", "prefill")
property_test = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(values: list[float], dtype: torch.dtype, device: str, scale: float | None = None) -> torch.Tensor:
    """What the cache holds after these values were written as one head's key, in float32."""
    key = torch.tensor(values, device=device).view(1, 1, -1)
    caches = torch.zeros(2, 1, 1, 1, len(values), dtype=torch.uint8, device=device).view(dtype)
    scales = None if scale is None else torch.tensor([scale], device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    kernels.reshape_and_cache(key, key, caches[0], caches[1], slot, key_scale=scales, value_scale=scales)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    return caches[0].flatten().cpu().float()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (448.0, 448.0), (464.0, 448.0), (1e30, 448.0), (math.inf, 448.0), (-math.inf, -448.0), (math.nan, math.nan),
        (1.0625, 1.0), (1.1875, 1.25), (1.07, 1.125), (-1.0625, -1.0),  # halfway goes to the even mantissa
        (2**-6, 2**-6), (2**-9, 2**-9), (2**-10, 0.0), (1.5 * 2**-9, 2**-8), (2.5 * 2**-9, 2**-8), (0.0, 0.0),
        (7.6 * 2**-9, 2**-6), (1.97 * 2**-6, 2**-5),  # rounding up into the next exponent
    ],
)  # fmt: skip
def test_float8_is_rounded_to_the_nearest_even_and_saturates(device: str, value: float, expected: float) -> None:
    assert stored([value], FLOAT8, device)[0].item() == pytest.approx(expected, abs=0, rel=0, nan_ok=True)


def test_int8_is_rounded_to_the_nearest_even_and_saturates(device: str) -> None:
    values = [0.5, 1.5, -0.5, -2.5, 126.5, 127.4, 500.0, -500.0, math.inf, -math.inf, math.nan]
    expected = [0, 2, 0, -2, 126, 127, 127, -127, 127, -127, 0]
    assert stored(values, torch.int8, device).tolist() == expected


def test_values_are_divided_by_the_scale(device: str) -> None:
    assert stored([1.0, -3.0, 1000.0], torch.int8, device, scale=0.5).tolist() == [2, -6, 127]
    assert stored([1.0, -3.0, 1000.0], FLOAT8, device, scale=4.0).tolist() == [0.25, -0.75, 256]


@pytest.mark.parametrize(("dtype", "largest"), [(FLOAT8, 448.0), (torch.int8, 127.0)])
def test_k29_a_scale_of_all_that_is_written_saturates_nothing(device: str, dtype: torch.dtype, largest: float) -> None:
    """The scale of the first half alone would cut the second half off."""
    values = torch.cat((torch.linspace(-3.0, 3.0, 32), torch.linspace(-700.0, 700.0, 32)))
    scale = 700.0 / largest
    read = stored(values.tolist(), dtype, device, scale=scale) * scale
    half_a_step = 0.501 if dtype == torch.int8 else 16.0  # of the largest codes
    torch.testing.assert_close(read, values, rtol=0, atol=half_a_step * scale)
    assert stored(values.tolist(), dtype, device, scale=3.0 / largest).abs().max() == largest


def test_every_float8_code_is_read_as_torch_reads_it(device: str) -> None:
    """One key a request and value rows of all codes: with a single key the output is the value."""
    codes = torch.arange(256, dtype=torch.uint8)
    for cut in (64, 46, 256):  # whole registers, and rests
        cache = codes[:cut].clone().view(FLOAT8).view(1, 1, 1, cut).to(device)
        keys = torch.zeros_like(cache, dtype=torch.float32).to(FLOAT8)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        tables, lengths = starts[:1].view(1, 1), starts[1:]
        query = torch.ones(1, 1, cut, device=device)
        for path in PATHS:
            out = kernels.paged_attention(query, keys, cache, tables, starts, lengths, scale=1.0, path=path)
            torch.testing.assert_close(
                out.flatten().cpu(), codes[:cut].view(FLOAT8).float(), rtol=0, atol=0, equal_nan=True
            )


@property_test
@given(data=st.data())
def test_written_bytes_equal_the_oracle(device: str, data: st.DataObject) -> None:
    draw = data.draw
    dtype, cache_dtype = draw(st.sampled_from(DTYPES[device])), draw(st.sampled_from(QUANTIZED_CACHE_DTYPES))
    heads, head_size, block_size = draw(st.integers(1, 4)), draw(st.sampled_from((1, 46, 64, 128))), 8
    slots = draw(st.lists(st.integers(0, 31), unique=True, min_size=1, max_size=20))
    amplitude = draw(st.sampled_from((0.01, 1.0, 300.0)))
    fused = (torch.randn(len(slots) + 1, 3 * heads, head_size) * amplitude).to(device, dtype)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    caches = torch.full((2, 4, heads, block_size, head_size), 77, device=device, dtype=torch.uint8).view(cache_dtype)
    expected = caches.clone()
    slot_mapping = torch.tensor(slots, device=device)
    scales = draw(st.sampled_from((None, torch.linspace(0.013, 2.7, heads, device=device))))
    options = {"key_scale": scales, "value_scale": None if scales is None else scales.flip(0)}
    kernels.reshape_and_cache(key, value, caches[0], caches[1], slot_mapping, check_values=True, **options)
    kernels.reference.reshape_and_cache(key, value, expected[0], expected[1], slot_mapping, **options)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))


@property_test
@given(data=st.data())
def test_attention_over_quantised_caches_equals_the_oracle(device: str, data: st.DataObject) -> None:
    draw = data.draw
    lengths = [draw(st.sampled_from(((1, 70), (9, 33), (1, 0), (5, 3), (40, 40), (1, 1), (2, 150)))) for _ in range(3)]
    batch = make_batch(
        lengths,
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 3, 4, 8))),
        head_size=draw(st.sampled_from((46, 64, 80, 96, 128, 192, 256))),
        block_size=draw(st.sampled_from((1, 16, 32))),
        dtype=draw(st.sampled_from(DTYPES[device])),
        cache_dtype=draw(st.sampled_from(QUANTIZED_CACHE_DTYPES)),
        device=device,
        seed=draw(st.integers(0, 1000)),
    )
    check(
        batch,
        causal=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.just(5.0)),
        path=draw(st.sampled_from(PATHS)),
        split_size=draw(st.none() | st.just(16)),
    )


@pytest.mark.parametrize("cache_dtype", QUANTIZED_CACHE_DTYPES)
def test_no_scales_are_scales_of_one(device: str, cache_dtype: torch.dtype) -> None:
    batch = make_batch([(1, 40), (9, 20)], cache_dtype=cache_dtype, device=device)
    batch.key_scale = batch.value_scale = torch.ones(2, device=device)
    expected = run(batch, scale=0.01)
    batch.key_scale = batch.value_scale = None
    assert all(torch.equal(a, b) for a, b in zip(run(batch, scale=0.01), expected, strict=True))


def test_splits_of_a_row_are_scaled_once(device: str) -> None:
    batch = make_batch([(1, 300)], cache_dtype=FLOAT8, device=device)
    expected = run(batch, scale=0.125)
    for split_size in (16, 64, 100):
        for a, b in zip(run(batch, scale=0.125, split_size=split_size), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_blocks_of_quantised_caches_move(device: str) -> None:
    for dtype in QUANTIZED_CACHE_DTYPES:
        cache = torch.randint(256, (2, 2, 6, 2, 4, 24), dtype=torch.uint8, device=device).view(dtype)
        expected = cache.view(torch.uint8).clone()
        expected[:, :, 5] = expected[:, :, 1]
        kernels.copy_blocks(cache, torch.tensor([(1, 5)]))
        assert torch.equal(cache.view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("scales", "error", "words"),
    [
        ([1.0], ValueError, r"key_scale: shape \[1\].*\[Hkv\] = \[2\]"),
        ([1.0, 0.0], ValueError, r"key_scale\[1\] is 0\.0+, expected a positive, finite number"),
        ([1.0, NAN], ValueError, r"key_scale\[1\] is -?nan"),
        ([math.inf, 1.0], ValueError, r"key_scale\[0\] is inf"),
    ],
)
def test_wrong_scales_are_named(device: str, scales: list[float], error: type[Exception], words: str) -> None:
    batch = make_batch([(1, 20)], cache_dtype=FLOAT8, device=device)
    key_scale = torch.tensor(scales, device=device)
    with pytest.raises(error, match=words):
        kernels.paged_attention(*batch.tensors(), scale=1.0, key_scale=key_scale, check_values=True)
    key = torch.zeros(1, 2, 64, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(error, match=words):
        kernels.reshape_and_cache(
            key, key, batch.key_cache, batch.value_cache, slots, key_scale=key_scale, check_values=True
        )


def test_scales_of_a_cache_of_floats_are_refused(device: str) -> None:
    batch = make_batch([(1, 20)], device=device)
    ones = torch.ones(2, device=device)
    with pytest.raises(ValueError, match="value_scale: .*caches of torch.float32 have no scales"):
        kernels.paged_attention(*batch.tensors(), scale=1.0, value_scale=ones)
    quantised = make_batch([(1, 20)], cache_dtype=torch.int8, device=device)
    with pytest.raises(TypeError, match="key_scale: torch.float64; torch.float32 is needed"):
        kernels.paged_attention(*quantised.tensors(), scale=1.0, key_scale=ones.double())


def test_two_caches_of_two_dtypes_are_refused(device: str) -> None:
    batch = make_batch([(1, 20)], cache_dtype=FLOAT8, device=device)
    batch.value_cache = batch.value_cache.view(torch.int8)
    with pytest.raises(ValueError, match="value_cache: .*as key_cache, .*float8_e4m3fn"):
        run(batch, scale=1.0)
