"""Products of few rows equal the float64 oracle, whatever the rows beside them, and read nothing that is not theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels.gemm import MAX_ROWS
from tests.kernels.attention_cases import NAN

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SUMS = 2e-6  # of float32 sums, against the size of what is added up
property_test = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
depths = st.sampled_from((8, 56, 64, 72, 576, 1024, 4096)) | st.integers(1, 40).map(lambda n: 8 * n)
columns = st.sampled_from((1, 7, 8, 15, 16, 17, 100)) | st.integers(1, 200)


def embedded(rows: int, width: int, dtype: torch.dtype, device: str, seed: int, size: float = 1.0) -> torch.Tensor:
    """Random rows inside a larger tensor that is NaN everywhere else."""
    whole = torch.full((rows + 2, width + 16), NAN)
    whole[1 : rows + 1, 8 : 8 + width] = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * size
    return whole.to(device, dtype)[1 : rows + 1, 8 : 8 + width]


def assert_close(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
    """Within the rounding of the result and of float32 sums."""
    expected = kernels.reference.skinny_gemm(x, w, bias, gated=gated)
    terms = x.double().abs() @ w.double().abs().T + (0 if bias is None else bias.double().abs())
    if gated:  # what an error of the gate does to the result, and one of the up projection
        gate, up = terms.chunk(2, dim=1)
        terms = gate * up * 2 + gate + up
    error = (out.double() - expected).abs()
    bound = ROUNDING[out.dtype] * expected.abs() + SUMS * terms + 1e-7
    assert bool((error <= bound).all()), f"off by {(error / bound).max():.2f} of what is allowed"


@property_test
@given(data=st.data(), tokens=st.integers(0, MAX_ROWS), k=depths, n=columns, seed=st.integers(0, 10**6))
def test_products_equal_the_oracle(device: str, data: st.DataObject, tokens: int, k: int, n: int, seed: int) -> None:
    draw = data.draw
    dtype, gated = draw(st.sampled_from(DTYPES[device])), draw(st.booleans())
    out_dtype = draw(st.sampled_from((dtype, torch.float32)))
    rows = 2 * n if gated else n
    x, weight = embedded(tokens, k, dtype, device, seed), embedded(rows, k, dtype, device, seed + 1, k**-0.5)
    bias = embedded(1, rows, dtype, device, seed + 2)[0].clone() if draw(st.booleans()) else None
    whole = torch.full((tokens + 2, n + 5), NAN, dtype=out_dtype, device=device)
    out = whole[1 : tokens + 1, 2 : 2 + n]
    assert kernels.skinny_gemm(x, weight, bias, gated=gated, out=out) is out
    assert_close(out, x, weight, bias, gated)
    kept = torch.ones_like(whole, dtype=torch.bool)
    kept[1 : tokens + 1, 2 : 2 + n] = False
    assert whole[kept].isnan().all(), "elements next to the result were written"
    fresh = kernels.skinny_gemm(x, weight, bias, gated=gated, out_dtype=out_dtype, overlap=True)
    assert torch.equal(fresh, out), "the result differs between two calls"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [3, 7, 9, 16, 17, 40, 64])
def test_a_row_does_not_depend_on_the_rows_beside_it(device: str, rows: int, gated: bool) -> None:
    dtype, k = DTYPES[device][0], 14336  # some of these take clusters on a GPU
    x, weight = embedded(rows, k, dtype, device, 0), embedded(96, k, dtype, device, 1, k**-0.5)
    first = kernels.skinny_gemm(x, weight, gated=gated)
    x[: rows - 1] = embedded(rows - 1, k, dtype, device, 2, 30.0)
    assert torch.equal(kernels.skinny_gemm(x, weight, gated=gated)[-1], first[-1])


@pytest.mark.parametrize(("n", "k"), [(96, 8), (96, 576), (96, 2048), (576, 1536)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_how_many_there_are(device: str, n: int, k: int, gated: bool) -> None:
    dtype = DTYPES[device][0]
    x, weight = embedded(MAX_ROWS, k, dtype, device, 0), embedded(n, k, dtype, device, 1, k**-0.5)
    most_of_few = 16  # on a GPU another kernel takes more rows, or takes more than 8 where it is the faster one
    if device != "cpu" and kernels.skinny_gemm_rows(weight, gated=gated) > 16:
        most_of_few = 8
    for slices, most in ((((0, 1), (3, 4), (2, 7)), most_of_few), (((5, 22), (30, 62), (2, 50), (47, 64)), MAX_ROWS)):
        together = kernels.skinny_gemm(x[:most], weight, gated=gated)
        for first, last in slices:
            assert torch.equal(kernels.skinny_gemm(x[first:last], weight, gated=gated), together[first:last])
    together = kernels.skinny_gemm(x[: 16 if most_of_few == 16 else MAX_ROWS], weight, gated=gated)
    for first, last in ((5, 14), (7, 16), (0, 16)):
        assert torch.equal(kernels.skinny_gemm(x[first:last], weight, gated=gated), together[first:last])


@pytest.mark.parametrize(("n", "k"), [(96, 64), (576, 1536), (4096, 4096), (6144, 4096), (4096, 14336)])
def test_the_rows_to_take_are_of_one_pass_and_no_more_than_the_op_takes(device: str, n: int, k: int) -> None:
    if device == "cpu":
        pytest.skip("the CPU's layers take a packed weight")
    weight = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    hopper = torch.cuda.get_device_capability(weight.device) == (9, 0)
    assert 0 <= kernels.skinny_gemm_rows(weight) <= (MAX_ROWS if hopper else 16)
    assert 0 <= kernels.skinny_gemm_rows(weight, gated=True) <= 16


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 33, 64])
def test_a_row_of_nan_stays_alone(device: str, tokens: int) -> None:
    dtype = DTYPES[device][0]
    x, weight = embedded(tokens, 200, dtype, device, 0), embedded(50, 200, dtype, device, 1)
    clean = kernels.skinny_gemm(x, weight)
    x[tokens - 1, 17] = NAN
    weight[33, 199] = torch.inf
    out = kernels.skinny_gemm(x, weight)
    assert out[-1].isnan().all()
    assert not out[:-1, 33].isfinite().any()
    others = [n for n in range(50) if n != 33]
    assert torch.equal(out[:-1, others], clean[:-1, others])


@pytest.mark.parametrize("tokens", [5, 17, 20, 64])
def test_rows_may_be_one_and_the_same(device: str, tokens: int) -> None:
    dtype = DTYPES[device][0]
    row, weight = embedded(1, 200, dtype, device, 0), embedded(50, 200, dtype, device, 1)
    x = row.expand(tokens, -1)
    assert x.stride(0) == 0
    assert_close(kernels.skinny_gemm(x, weight), x, weight, None, False)


def test_gated_is_silu_and_mul_of_the_product(device: str) -> None:
    dtype = DTYPES[device][0]
    x, weight = embedded(5, 64, dtype, device, 0), embedded(40, 64, dtype, device, 1)
    product = kernels.skinny_gemm(x, weight, out_dtype=torch.float32)
    expected = kernels.reference.silu_and_mul(product)
    actual = kernels.skinny_gemm(x, weight, gated=True, out_dtype=torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [6, 24, 64])
def test_a_captured_graph_takes_the_rows_of_its_replay(device: str, rows: int) -> None:
    if device == "cpu":
        pytest.skip("graphs are CUDA's")

    def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
        return embedded(rows, columns, torch.bfloat16, device, seed, columns**-0.5)

    x, out, scale = torch.zeros_like(matrix(rows, 512, 0)), matrix(rows, 512, 0), matrix(1, 512, 1)[0].clone()
    into, back = matrix(4096, 512, 2), matrix(512, 2048, 3)

    def chain(overlap: bool) -> torch.Tensor:
        """Layers whose every kernel reads what the one ahead of it wrote."""
        hidden = x
        for _ in range(4):
            normed = kernels.rms_norm(hidden, scale, 1e-5)
            gated = kernels.skinny_gemm(normed, into, gated=True, overlap=overlap)
            hidden = kernels.skinny_gemm(gated, back, overlap=overlap)
        return hidden

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(chain(True))
    for seed in range(20):
        x.copy_(matrix(rows, 512, seed))
        graph.replay()
        assert torch.equal(out, chain(False))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.ones(65, 8), torch.ones(4, 8)), {}, ValueError, "x: shape .65, 8.*at most 64"),
        ((torch.ones(2, 12), torch.ones(4, 12)), {}, ValueError, "K a multiple of 8"),
        ((torch.ones(2, 8), torch.ones(4, 16)), {}, ValueError, "weight: .*K = 8"),
        ((torch.ones(2, 8), torch.ones(3, 8)), {"gated": True}, ValueError, "N has to be even"),
        ((torch.ones(2, 8), torch.ones(4, 8).bfloat16()), {}, TypeError, "weight: torch.bfloat16"),
        ((torch.ones(2, 8).half(), torch.ones(4, 8).half()), {}, TypeError, "torch.float16 on cpu"),
        ((torch.ones(2, 8), torch.ones(4, 8), torch.ones(3)), {}, ValueError, "bias: .*= .4."),
        ((torch.ones(2, 8), torch.ones(4, 8)), {"out": torch.ones(2, 5)}, ValueError, "out: .*= .2, 4."),
        ((torch.ones(2, 8), torch.ones(4, 8)), {"out": torch.ones(2, 4).long()}, TypeError, "out: torch.int64"),
        ((torch.ones(2, 16)[:, ::2], torch.ones(4, 8)), {}, ValueError, "x: .*contiguous"),
        (
            (torch.ones(2, 8), torch.ones(4, 8)),
            {"out": torch.ones(2, 4), "out_dtype": torch.bfloat16},
            TypeError,
            "out_dtype",
        ),
    ],
)
def test_errors_name_the_argument_and_the_rule(arguments: tuple, options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        kernels.skinny_gemm(*arguments, **options)
