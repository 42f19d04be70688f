"""Products with packed weights equal the float64 formula; packing puts every element where the kernels look for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels.quantized import KINDS, QuantizedWeight, columns_of, unpack_weight
from research_engine.kernels.quantized import _pack_cuda as pack_cuda
from research_engine.kernels.quantized import _unpack_cuda as unpack_cuda
from tests.kernels.attention_cases import NAN

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a row's Euclidean norm
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_codes(kind: str, n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """q in its whole range; float8 without its two codes of NaN."""
    codes = torch.randint(0, 1 << KINDS[kind].bits, (n, k), dtype=torch.uint8, generator=generator)
    if kind != "float8":
        return codes
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(torch.float8_e4m3fn)


def random_weight(
    kind: str,
    n: int,
    k: int,
    group_size: int,
    *,
    device: str = "cpu",
    zeros: bool = False,
    offsets: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = k // group_size
    amplitude = 0.1 / (1 << KINDS[kind].bits)
    scales = ((torch.rand(groups, n, generator=generator) + 0.5) * amplitude).to(scale_dtype)
    zero = torch.randint(0, 1 << KINDS[kind].bits, (groups, n), dtype=torch.uint8, generator=generator)
    offset = (torch.randn(groups, n, generator=generator) * 0.1).to(scale_dtype)
    return kernels.pack_weight(
        random_codes(kind, n, k, generator).to(device),
        scales.to(device),
        zero.to(device) if zeros and kind != "float8" else None,
        offset.to(device) if offsets and kind == "int4" else None,
        kind=kind,
    )


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> None:
    """Row by row, against the size that a row's sums of products have, and the bias with them."""
    terms = x.double().norm(dim=1, keepdim=True) * kernels.reference.dequantize_weight(weight).norm(dim=1)[None]
    if bias is not None:
        terms = terms + bias.double().abs()
    error = (actual.double() - expected).abs()
    bound = TOLERANCE[x.dtype] * terms.clamp_min(1e-30)
    assert bool((error <= bound).all()), f"off by {(error / bound).max():.2f} of what is allowed"


@property_test
@given(data=st.data())
def test_products_equal_the_formula(device: str, data: st.DataObject) -> None:
    draw = data.draw
    dtype, kind = draw(st.sampled_from(DTYPES[device])), draw(st.sampled_from(tuple(KINDS)))
    groups, group_size = draw(st.integers(1, 4)), draw(st.sampled_from((32, 64, 96, 128, 160)))
    n, k, tokens = draw(st.integers(1, 200)), groups * group_size, draw(st.integers(0, 40))
    scale_dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    weight = random_weight(
        kind, n, k, group_size, device=device, zeros=draw(st.booleans()), offsets=draw(st.booleans()),
        scale_dtype=scale_dtype, seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    wide = torch.full((tokens, k + 16), NAN, device=device, dtype=dtype)
    x, out = wide[:, 8 : 8 + k], torch.full((tokens, n + 5), NAN, device=device, dtype=dtype)
    x.copy_(torch.randn(tokens, k, generator=torch.Generator().manual_seed(3)) + draw(st.sampled_from((0.0, 1.0))))
    bias = torch.randn(n, generator=torch.Generator().manual_seed(4)).to(device, dtype) if draw(st.booleans()) else None
    got = kernels.quantized_matmul(x, weight, bias, out=out[:, 2 : 2 + n])
    assert got.data_ptr() == out[:, 2:].data_ptr()
    assert_close(got, kernels.reference.quantized_matmul(x, weight, bias), x, weight, bias)
    assert out[:, :2].isnan().all() and out[:, 2 + n :].isnan().all(), "columns next to the result were written"
    assert torch.equal(kernels.quantized_matmul(x, weight, bias), out[:, 2 : 2 + n])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offsets", [False, True])
def test_the_weight_as_floats_is_the_formula_rounded_once(device: str, kind: str, offsets: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = random_weight(kind, 75, 192, 64, device=device, zeros=True, offsets=offsets)
        out = torch.full((75, 200), NAN, dtype=dtype, device=device)
        kernels.dequantize_weight(weight, out=out[:, :192])
        expected = kernels.reference.dequantize_weight(weight)
        tolerance = 3e-7 if dtype is torch.float32 else 2**-8
        torch.testing.assert_close(out[:, :192].double(), expected, rtol=tolerance, atol=1e-8)
        assert out[:, 192:].isnan().all()
        assert torch.equal(kernels.dequantize_weight(weight, dtype), out[:, :192])


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_read_as_its_number(device: str, kind: str) -> None:
    """One row of x picks column k of the weight."""
    codes = random_codes(kind, 1, 256, torch.Generator().manual_seed(0))
    count = 1 << KINDS[kind].bits
    raw = codes.view(torch.uint8)
    raw[0, :count] = torch.arange(count, dtype=torch.uint8)
    if kind == "float8":
        raw[raw & 0x7F == 0x7F] = 0
    weight = kernels.pack_weight(codes.to(device), torch.ones(1, 1, device=device), kind=kind)
    x = torch.eye(256, device=device, dtype=torch.bfloat16)
    picked = kernels.quantized_matmul(x, weight)[:, 0].float().cpu()
    zero = KINDS[kind].default_zero
    assert torch.equal(picked, codes[0].float() - zero)
    assert torch.equal(kernels.dequantize_weight(weight, torch.float32).cpu()[0], codes[0].float() - zero)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_can_be_undone(device: str, kind: str) -> None:
    codes = random_codes(kind, 75, 192, torch.Generator().manual_seed(1)).to(device)
    weight = kernels.pack_weight(codes, torch.ones(3, 75, device=device), kind=kind)
    assert torch.equal(unpack_weight(weight).view(torch.uint8), codes.view(torch.uint8))


def test_the_layout_on_the_cpu() -> None:
    """Word w of column n holds elements 8 w ... 8 w + 7, the first in the lowest bits; 32 columns side by side."""
    codes = torch.zeros(33, 64, dtype=torch.uint8)
    codes[5, 8:16] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 15])
    codes[32, 0] = 9
    weight = kernels.pack_weight(codes, torch.ones(1, 33), kind="int4").weight
    assert weight.shape == (2, 8, 32)
    assert weight[0, 1, 5].item() & 0xFFFFFFFF == 0xF7654321
    assert weight[1, 0, 0].item() == 9
    assert weight.count_nonzero() == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_every_element_lies_in_the_fragment_that_the_tensor_core_expects(bits: int) -> None:
    """Reads the packed words as csrc/cuda/quantized_matmul.cuh does, lane by lane.

    mma.m16n8k16: with g = lane / 4 and q = lane % 4, a0 holds rows g and columns 2q, 2q + 1 of the tile of W, a1 rows
    g + 8, a2 and a3 the same of columns 2q + 8, 2q + 9. The kernel gives column pairs (2q, 2q + 1) and (2q + 8, 2q + 9)
    of step s the depths 8q + 4s + (0, 1) and (2, 3) of 32, in W and in x alike.
    """
    depth = 256 if bits == 4 else 128
    n, k = 128, 2 * depth
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_cuda(codes, bits)
    assert torch.equal(unpack_cuda(packed, bits), codes)
    words = packed.view(2, 8, 2, 2, 32, 4)  # unit, warp, m, vector, lane, word
    table = (words.to(torch.int64) & 0xFFFFFFFF).tolist()
    rows = codes.tolist()
    seen = torch.zeros(n, k, dtype=torch.int64)
    parts = 2 if bits == 4 else 1  # of a vector
    for unit, warp, m, lane in itertools.product((0, 1), range(8), (0, 1), range(32)):
        g, q, warp_n, warp_k = lane // 4, lane % 4, warp % 4, warp // 4
        first_row = warp_n * 32 + m * 16
        for vector, part, step in itertools.product((0, 1), range(parts), (0, 1)):
            word = table[unit][warp][m][vector][lane]
            first_k = unit * depth + warp_k * depth // 2 + (vector * parts + part) * 32 + 8 * q + 4 * step
            for register, side in itertools.product(range(4), (0, 1)):  # side: low and high half of the register
                row, column = first_row + g + 8 * (register % 2), first_k + 2 * (register // 2) + side
                if bits == 4:  # the register is word >> 4 register & 0x000f000f
                    value = word[2 * part + step] >> (4 * register + 16 * side) & 15
                else:  # word 2 step holds row g, word 2 step + 1 row g + 8
                    value = word[2 * step + register % 2] >> (8 * (2 * (register // 2) + side)) & 255
                assert value == rows[row][column]
                seen[row, column] += 1
    assert (seen == 1).all(), "an element is missing, or is multiplied twice"


def test_a_row_does_not_depend_on_the_rows_around_it(device: str) -> None:
    dtype = DTYPES[device][0]
    weight = random_weight("int4", 300, 512, 128, device=device)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    together = kernels.quantized_matmul(x, weight)
    for row in (0, 7, 9, 15):
        assert torch.equal(kernels.quantized_matmul(x[row : row + 1], weight), together[row : row + 1])


def test_the_same_call_gives_the_same_bits(device: str) -> None:
    dtype = DTYPES[device][0]
    weight = random_weight("int4", 520, 1024, 128, device=device)
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    first = kernels.quantized_matmul(x, weight)
    assert all(torch.equal(kernels.quantized_matmul(x, weight), first) for _ in range(50))


@pytest.mark.gpu
def test_one_workspace_serves_weights_and_rows_of_all_sizes(device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU kernel takes no workspace")
    weights = [random_weight("int4", n, 512, 64, device=device) for n in (100, 3000, 700)]
    workspace = torch.zeros(max(kernels.quantized_matmul_workspace(w, 60) for w in weights), device=device)
    for rows in (3, 60, 9):
        x = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
        for weight in weights:
            out = kernels.quantized_matmul(x, weight, workspace=workspace)
            assert_close(out, kernels.reference.quantized_matmul(x, weight), x, weight)


def test_nan_in_x_stays_in_its_row(device: str) -> None:
    weight = random_weight("int4", 70, 64, 32, device=device)
    x = torch.ones(3, 64, device=device, dtype=DTYPES[device][0])
    x[1, 40] = NAN
    assert kernels.quantized_matmul(x, weight).isnan().all(dim=1).tolist() == [False, True, False]


def test_columns_of_a_weight_are_those_of_the_product(device: str) -> None:
    weight = random_weight("int4", 300, 64, 32, device=device, zeros=True, offsets=True)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(device, DTYPES[device][0])
    whole = kernels.quantized_matmul(x, weight)
    for first, last in ((0, 128), (128, 300), (0, 300)):
        part = kernels.quantized_matmul(x, columns_of(weight, first, last))
        torch.testing.assert_close(part, whole[:, first:last], rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="columns 5 to 300 of 300: both have to be multiples of"):
        columns_of(weight, 5, 300)


@pytest.mark.gpu
def test_k18_a_captured_graph_replays_with_other_rows() -> None:
    from tests.conftest import cuda_reason

    if reason := cuda_reason():
        pytest.skip(reason)
    weight = random_weight("int4", 4096, 4096, 128, device="cuda")
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(8, 4096, device="cuda", dtype=torch.bfloat16)
    workspace = torch.zeros(kernels.quantized_matmul_workspace(weight, 8), device="cuda")
    kernels.quantized_matmul(x, weight, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.quantized_matmul(x, weight, out=out, workspace=workspace)
    for seed in range(3):
        x.copy_(torch.randn(8, 4096, generator=torch.Generator().manual_seed(seed)))
        out.fill_(NAN)
        graph.replay()
        assert_close(out, kernels.reference.quantized_matmul(x, weight), x, weight)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kind": "int3"}, ValueError, "kind='int3'; it is one of int4, int8, float8"),
        ({"kind": "float8"}, ValueError, "values: .*torch.float8_e4m3fn.* is needed for float8"),
        ({"scales": torch.ones(2, 8)}, ValueError, r"scales: shape \[2, 8\].*N = 16"),
        ({"scales": torch.ones(3, 16)}, ValueError, "K / G = 128 / G a multiple of 32"),
        ({"scales": torch.ones(8, 16)}, ValueError, "K / G = 128 / G a multiple of 32"),
        ({"scales": torch.ones(2, 16).double()}, ValueError, "scales: .*float64.*float32, bfloat16 or float16"),
        ({"zeros": torch.ones(2, 16)}, ValueError, "zeros: .*uint8 as scales"),
        ({"offsets": torch.ones(1, 16)}, ValueError, "offsets: .*the shape of scales"),
    ],
)
def test_what_cannot_be_packed_is_named(change: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"values": torch.zeros(16, 128, dtype=torch.uint8), "scales": torch.ones(2, 16), "kind": "int4"}
    with pytest.raises(error, match=words):
        kernels.pack_weight(**{**arguments, **change})  # type: ignore[arg-type]


def test_wrong_arguments_are_named(device: str) -> None:
    weight = random_weight("int4", 70, 64, 32, device=device)
    x = torch.zeros(3, 64, device=device, dtype=DTYPES[device][0])
    with pytest.raises(ValueError, match=r"x: shape \[3, 128\].*\[T, K\] = \[T, 64\]"):
        kernels.quantized_matmul(torch.cat((x, x), dim=1), weight)
    with pytest.raises(ValueError, match=r"out: shape \[2, 70\].*\[T, N\] = \[3, 70\]"):
        kernels.quantized_matmul(x, weight, out=x.new_empty(2, 70))
    with pytest.raises(TypeError, match="x: torch.float64"):
        kernels.quantized_matmul(x.double(), weight)
    with pytest.raises(ValueError, match=r"x: shape \[64\].*\[T, K\]"):
        kernels.quantized_matmul(x[0], weight, out=x.new_empty(1, 70))
    with pytest.raises(ValueError, match="out: .*last dimension"):
        kernels.dequantize_weight(weight, out=x.new_empty(64, 70).T)
    for wrong in ((69, 64), (128, 64), (70, 63), (70, 128)):
        with pytest.raises(ValueError, match=rf"out: shape \[{wrong[0]}, {wrong[1]}\].*\[N, K\] = \[70, 64\]"):
            kernels.dequantize_weight(weight, out=x.new_empty(wrong))
    for columns in (69, 96, 128):
        with pytest.raises(ValueError, match=rf"out: shape \[3, {columns}\].*\[T, N\] = \[3, 70\]"):
            kernels.quantized_matmul(x, weight, out=x.new_empty(3, columns))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_float8_codes_that_are_no_number_are_refused(device: str, code: int) -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[3, 5] = codes[9, 0] = code
    values, scales = codes.view(torch.float8_e4m3fn).to(device), torch.ones(2, 16, device=device)
    with pytest.raises(ValueError, match=r"values\[3, 5\] is NaN, one of 2; weights have to be numbers"):
        kernels.pack_weight(values, scales, kind="float8")
