"""The row-wise ops (norms, activation, rotary embedding) equal the float64 oracle and keep what is not theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES, QUANTIZED_CACHE_DTYPES
from tests.kernels.attention_cases import NAN

DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
widths = st.sampled_from((1, 15, 16, 17, 64, 100, 576, 1024, 4096)) | st.integers(1, 300)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def strided(rows: int, width: int, dtype: torch.dtype, device: str, seed: int, amplitude: float = 1.0) -> torch.Tensor:
    """Rows inside wider ones whose other elements are NaN."""
    whole = torch.full((rows, width + 5), NAN)
    whole[:, 3 : 3 + width] = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * amplitude
    return whole.to(device, dtype)[:, 3 : 3 + width]


@property_test
@given(data=st.data(), rows=st.integers(0, 40), width=widths, seed=st.integers(0, 10**6))
def test_rms_norm(device: str, data: st.DataObject, rows: int, width: int, seed: int) -> None:
    dtype, amplitude = data.draw(st.sampled_from(DTYPES[device])), data.draw(st.sampled_from((1e-4, 1.0, 100.0)))
    x, out = strided(rows, width, dtype, device, seed, amplitude), strided(rows, width, dtype, device, 0)
    weight, offset = torch.randn(width).to(device, dtype), data.draw(st.sampled_from((0.0, 1.0)))
    assert kernels.rms_norm(x, weight, 1e-5, weight_offset=offset, out=out) is out
    assert_close(out, kernels.reference.rms_norm(x, weight, 1e-5, weight_offset=offset), dtype)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5, weight_offset=offset), out)


@property_test
@given(data=st.data(), rows=st.integers(0, 40), width=widths, seed=st.integers(0, 10**6))
def test_fused_add_rms_norm(device: str, data: st.DataObject, rows: int, width: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from(DTYPES[device]))
    x, residual = strided(rows, width, dtype, device, seed), strided(rows, width, dtype, device, seed + 1)
    weight, offset = torch.randn(width).to(device, dtype), data.draw(st.sampled_from((0.0, 1.0)))
    expected_x, expected_residual = x.clone(), residual.clone()
    kernels.reference.fused_add_rms_norm(expected_x, expected_residual, weight, 1e-6, weight_offset=offset)
    kernels.fused_add_rms_norm(x, residual, weight, 1e-6, weight_offset=offset)
    assert_close(residual, expected_residual, dtype)
    assert_close(x, expected_x, dtype)


@property_test
@given(data=st.data(), rows=st.integers(0, 40), width=widths, seed=st.integers(0, 10**6))
def test_silu_and_mul(device: str, data: st.DataObject, rows: int, width: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from(DTYPES[device]))
    x = strided(rows, 2 * width, dtype, device, seed, amplitude=data.draw(st.sampled_from((1.0, 5.0))))
    out = strided(rows, width, dtype, device, 0)
    assert kernels.silu_and_mul(x, out=out) is out
    assert_close(out, kernels.reference.silu_and_mul(x), dtype)
    assert torch.equal(kernels.silu_and_mul(x), out)


def test_silu_at_the_ends_of_the_range(device: str) -> None:
    gate = torch.tensor(
        [-torch.inf, -1e30, -200.0, -88.0, -87.0, -20.0, 0.0, 20.0, 88.8, 200.0, 1e30, torch.inf, torch.nan]
    )
    x = torch.stack((gate, torch.ones_like(gate))).flatten()[None].to(device)
    out = kernels.silu_and_mul(x)[0].cpu()
    assert out[0].isnan() or out[0] == 0  # -inf * 0
    assert out[-1].isnan()
    torch.testing.assert_close(out[1:-1], gate[1:-1] * torch.sigmoid(gate[1:-1]), rtol=1e-5, atol=1e-35)


@property_test
@given(data=st.data(), tokens=st.integers(0, 20), interleaved=st.booleans(), seed=st.integers(0, 10**6))
def test_rotary_embedding(device: str, data: st.DataObject, tokens: int, interleaved: bool, seed: int) -> None:
    draw = data.draw
    dtype, heads, kv_heads = draw(st.sampled_from(DTYPES[device])), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    head_size = draw(st.sampled_from((2, 32, 46, 64, 80, 120, 128, 256)))
    rotary_dim = 2 * draw(st.integers(1, head_size // 2))
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_size, generator=generator).to(device, dtype)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(device)
    expected = fused.clone()
    kernels.reference.rotary_embedding(
        positions, expected[:, :heads], expected[:, heads : heads + kv_heads], cos_sin, interleaved=interleaved
    )
    kernels.rotary_embedding(
        positions, fused[:, :heads], fused[:, heads : heads + kv_heads], cos_sin, interleaved=interleaved
    )
    assert_close(fused, expected, dtype)
    assert torch.equal(fused[:, heads + kv_heads :], expected[:, heads + kv_heads :]), (
        "the values next to the keys changed"
    )
    assert torch.equal(fused[:, :, rotary_dim:], expected[:, :, rotary_dim:]), "elements past rotary_dim changed"


def test_k15_queries_and_keys_of_different_strides_are_rotated(device: str) -> None:
    wide, tall = torch.randn(5, 7, 32, device=device), torch.randn(10, 3, 40, device=device)
    query, key = wide[:, 1:5], tall[::2, 1:, 4:36]
    expected, around = (query.clone(), key.clone()), (wide[:, 5:].clone(), tall[1::2].clone())
    angles = torch.rand(50, 16, device=device) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(5, device=device) * 7
    kernels.reference.rotary_embedding(positions, *expected, cos_sin)
    kernels.rotary_embedding(positions, query, key, cos_sin)
    for rotated, wanted in zip((query, key), expected, strict=True):
        assert_close(rotated, wanted, torch.float32)
    assert torch.equal(wide[:, 5:], around[0]) and torch.equal(tall[1::2], around[1]), "wrote beside"


@property_test
@given(data=st.data(), tokens=st.integers(0, 20), interleaved=st.booleans(), seed=st.integers(0, 10**6))
def test_rotary_and_cache_is_the_rotation_and_then_the_write(
    device: str, data: st.DataObject, tokens: int, interleaved: bool, seed: int
) -> None:
    draw = data.draw
    dtype, heads, kv_heads = draw(st.sampled_from(DTYPES[device])), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    head_size = draw(st.sampled_from((2, 32, 46, 64, 80, 128)))
    rotary_dim = draw(st.sampled_from((head_size, 2 * draw(st.integers(1, head_size // 2)))))
    cache_dtype = draw(st.sampled_from((dtype, *QUANTIZED_CACHE_DTYPES)))
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_size, generator=generator).to(device, dtype)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(device)
    slots = (torch.randperm(24, generator=generator)[: max(0, tokens - draw(st.integers(0, 2)))] - 1).to(device)
    caches = torch.full((2, 3, kv_heads, 8, head_size), 77, dtype=torch.uint8).view(torch.uint8).to(device)
    caches = caches.to(cache_dtype)
    scales = None if cache_dtype is dtype else torch.linspace(0.01, 0.9, kv_heads, device=device)
    options = {"key_scale": scales, "value_scale": scales}
    expected_fused, expected_caches = fused.clone(), caches.clone()

    def parts(whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return whole[:, :heads], whole[:, heads : heads + kv_heads], whole[:, heads + kv_heads :]

    query, key, value = parts(expected_fused)
    before = key.clone()
    kernels.rotary_embedding(positions, query, key, cos_sin, interleaved=interleaved)
    kernels.reshape_and_cache(key, value, expected_caches[0], expected_caches[1], slots, **options)
    key.copy_(before)
    kernels.rotary_and_cache(positions, *parts(fused), cos_sin, *caches, slots, interleaved=interleaved, **options)
    assert torch.equal(fused, expected_fused)
    assert torch.equal(caches.view(torch.uint8), expected_caches.view(torch.uint8))


def test_rms_norm_in_place(device: str) -> None:
    x, weight = torch.randn(5, 70, device=device), torch.randn(70, device=device)
    expected = kernels.rms_norm(x, weight, 1e-5)
    kernels.rms_norm(x, weight, 1e-5, out=x)
    assert torch.equal(x, expected)


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    x, weight = torch.randn(300, 576, device=device), torch.randn(576, device=device)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5)[7:8], kernels.rms_norm(x[7:8], weight, 1e-5))
    assert torch.equal(kernels.silu_and_mul(x)[7:8], kernels.silu_and_mul(x[7:8]))


def test_nan_stays_in_its_row(device: str) -> None:
    x = torch.randn(3, 64, device=device)
    x[1, 5] = NAN
    out = kernels.rms_norm(x, torch.ones(64, device=device), 1e-5)
    assert out.isnan().all(dim=1).tolist() == [False, True, False]
    assert out.isnan().any(dim=1).tolist() == [False, True, False]


def test_k3_row_offsets_past_32_bits(device: str) -> None:
    """Rows 2^30 elements apart, so the third begins at 2^31; on the CPU the pages between are never touched."""
    stride = 2**30
    whole = torch.empty(2 * stride + 4096, device=device)
    x = whole.as_strided((3, 4096), (stride, 1))
    x.copy_(torch.randn(1, 4096))
    out = kernels.rms_norm(x, torch.ones(4096, device=device), 1e-5, out=x)
    gated = kernels.silu_and_mul(x)
    for row in (1, 2):
        assert torch.equal(out[row], out[0]) and torch.equal(gated[row], gated[0])
    assert out.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "rows", "width"), [("rms_norm", 524_288, 4096), ("silu_and_mul", 70_000, 34_816)])
def test_k3_more_elements_than_31_bits_count(device: str, op: str, rows: int, width: int) -> None:
    if device == "cpu":
        pytest.skip("4 GiB of input and minutes of CPU time; the CPU's offsets are tested above")
    x = torch.randn(1, width, device=device).bfloat16().expand(rows, width).contiguous()
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    out = kernels.rms_norm(x, weight, 1e-5, out=x) if op == "rms_norm" else kernels.silu_and_mul(x)
    assert (out == out[:1]).all()
    assert out[0].abs().sum() > 0


def test_k11_more_rows_than_a_small_grid_dimension(device: str) -> None:
    x = torch.randn(65_537, 8, device=device)
    assert_close(
        kernels.rms_norm(x, torch.ones(8, device=device), 1e-5),
        kernels.reference.rms_norm(x, torch.ones(8, device=device), 1e-5),
        x.dtype,
    )
    assert_close(kernels.silu_and_mul(x), kernels.reference.silu_and_mul(x), x.dtype)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: kernels.rms_norm(t(3, 8, 2), t(8), 1e-5), ValueError, r"x: shape \[3, 8, 2\].*\[T, H\]"),
        (lambda t: kernels.rms_norm(t(3, 8), t(7), 1e-5), ValueError, r"weight: shape \[7\].*\[H\] = \[8\]"),
        (lambda t: kernels.rms_norm(t(8, 3).T, t(8), 1e-5), ValueError, "x: .*strides .*last dimension"),
        (lambda t: kernels.rms_norm(t(3, 8).double(), t(8), 1e-5), TypeError, "x: torch.float64"),
        (
            lambda t: kernels.rms_norm(t(3, 8), t(8).bfloat16(), 1e-5),
            TypeError,
            "weight: torch.bfloat16; torch.float32",
        ),
        (lambda t: kernels.rms_norm(t(3, 8), t(8), 1e-5, out=t(2, 8)), ValueError, r"out: shape \[2, 8\].*x's"),
        (lambda t: kernels.fused_add_rms_norm(t(3, 8), t(3, 9), t(8), 1e-5), ValueError, r"residual: shape \[3, 9\]"),
        (lambda t: kernels.silu_and_mul(t(3, 7)), ValueError, r"x: shape \[3, 7\].*\[T, 2I\]"),
        (lambda t: kernels.silu_and_mul(t(3, 8), out=t(3, 8)), ValueError, r"out: shape \[3, 8\].*\[T, I\] = \[3, 4\]"),
        (lambda t: kernels.rotary_embedding(t(3).long(), t(3, 2, 8), t(2, 1, 8), t(4, 8)), ValueError, "key: "),
        (
            lambda t: kernels.rotary_embedding(t(3), t(3, 2, 8), t(3, 1, 8), t(4, 8)),
            TypeError,
            "positions: torch.float32",
        ),
        (
            lambda t: kernels.rotary_embedding(t(3).long(), t(3, 2, 8), t(3, 1, 8), t(4, 9)),
            ValueError,
            "cos_sin: .*rotary_dim",
        ),
        (
            lambda t: kernels.rotary_embedding(t(3).long(), t(3, 2, 8), t(3, 1, 8), t(4, 10)),
            ValueError,
            "at most D = 8",
        ),
        (
            lambda t: kernels.rotary_embedding(t(3).long() + 4, t(3, 2, 8), t(3, 1, 8), t(4, 8), check_values=True),
            ValueError,
            r"positions\[0\] is 4, expected 0 to 3 \(cos_sin's rows\)",
        ),
    ],
)
def test_wrong_arguments_are_named(device: str, call: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(lambda *shape: torch.zeros(*shape, device=device))  # type: ignore[operator]
