"""The packed integers of AWQ, GPTQ and compressed-tensors, word by word, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from research_engine.layers.quantized import QuantizedProduct, QuantizedTensor
from research_engine.loading.errors import LoadError
from research_engine.loading.gguf_packed import quantized_blocks
from research_engine.loading.packing import AWQ_ORDER, unpack, unpack_awq
from research_engine.loading.quantized import QuantizedCheckpoint
from research_engine.models.quantization import Quantization
from tests.loading.quantizers import quantize


def int32(*words: int) -> list[int]:
    """Words as torch's signed integers."""
    return [word - (1 << 32) if word >> 31 else word for word in words]


class Tensors:
    """A checkpoint out of a dictionary."""

    location = "memory"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read_raw(self, name: str, device: torch.device) -> torch.Tensor:
        return self.tensors[name].to(device)

    read = read_raw


def matrix(tensors: dict[str, torch.Tensor], quantization: Quantization) -> QuantizedTensor:
    checkpoint = QuantizedCheckpoint(Tensors({f"m.{kind}": t for kind, t in tensors.items()}), quantization)
    found = checkpoint.quantized("m.weight", torch.device("cpu"))
    assert found is not None
    return found


def test_awq_words_hold_columns_0_2_4_6_1_3_5_7() -> None:
    """0x76543210: nibble i is i, so column AWQ_ORDER[i] is i."""
    assert AWQ_ORDER == (0, 2, 4, 6, 1, 3, 5, 7)
    columns = unpack_awq(torch.tensor([int32(0x76543210, 0xFEDCBA98)], dtype=torch.int32))
    assert columns.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]]


def test_gptq_words_hold_neighbours_in_order() -> None:
    words = torch.tensor([int32(0x76543210), int32(0xF0000001)], dtype=torch.int32)  # [K / 8 = 2, N = 1]
    assert unpack(words, 4, 0).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 1, 0, 0, 0, 0, 0, 0, 15]
    assert unpack(words, 4, 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 0, 0, 0, 0, 0, 15]]
    assert unpack(words, 8, 0).flatten().tolist() == [0x10, 0x32, 0x54, 0x76, 1, 0, 0, 0xF0]


def gptq(qzeros: int, bits: int = 4, zero_offset: int = 1) -> QuantizedTensor:
    """K = 32, N = 8 (4 bits) or 4, q counts along K; scales 0.5, and 2 in column 1."""
    per_word = 32 // bits
    n = per_word
    codes = torch.arange(32).remainder(1 << bits)[:, None].expand(32, n)
    words = sum(codes[i::per_word].long() << (bits * i) for i in range(per_word))
    scales = torch.full((1, n), 0.5, dtype=torch.float16)
    scales[0, 1] = 2
    tensors = {
        "qweight": torch.as_tensor(words).to(torch.uint32).view(torch.int32),
        "qzeros": torch.tensor([int32(qzeros)], dtype=torch.int32),
        "scales": scales,
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    return matrix(tensors, Quantization("gptq", bits, -1, zero_offset))


@pytest.mark.parametrize(
    ("qzeros", "bits", "zero_offset", "zero"),
    [
        (0x77777777, 4, 1, 8),  # symmetric, format v1: stored less one
        (0x88888888, 4, 0, 8),  # symmetric, format v2
        (0x7F7F7F7F, 8, 1, 128),
        (0x80808080, 8, 0, 128),
        (0x00000000, 4, 1, 1),
        (0x00000000, 4, 0, 0),
        (0xFFFFFFFF, 4, 1, 0),  # 15 + 1 does not fit 4 bits: it was 0, less one
        (0xFFFFFFFF, 4, 0, 15),
        (0xFFFFFFFF, 8, 1, 0),
    ],
)
def test_k25_gptq_zero_points_stay_within_the_bits(
    device: str, qzeros: int, bits: int, zero_offset: int, zero: int
) -> None:
    found = gptq(qzeros, bits, zero_offset).to(torch.device(device))
    dense = found.dequantize()
    expected = (torch.arange(32, device=device).remainder(1 << bits) - zero).float()
    assert torch.equal(dense[0], expected * 0.5)
    assert torch.equal(dense[1], expected * 2)
    one = torch.eye(32, device=device, dtype=torch.float32 if device == "cpu" else torch.float16)[:7]
    assert torch.equal(QuantizedProduct([found])(one).float(), dense.T[:7])  # multiples of a half, below 2^11: exact


def test_the_zero_points_of_symmetric_weights_take_no_memory() -> None:
    assert gptq(0x77777777).zeros is None and gptq(0x66666666).zeros is not None


def test_awq_formula_by_hand() -> None:
    """Two groups of 32, 8 columns; column 6 is nibble 3, column 1 is nibble 4."""
    qweight = torch.zeros(64, 1, dtype=torch.int32)
    qweight[0, 0], qweight[40, 0] = 0x0000F000, 0x00090000  # w[6, 0]: 15; w[1, 40]: 9
    qzeros = torch.tensor(
        [[0x0000_3000], [0x0005_0000]], dtype=torch.int32
    )  # zero of column 6 in group 0, 1 in group 1
    scales = torch.ones(2, 8, dtype=torch.float16)
    scales[0, 6], scales[1, 1] = 0.25, 2
    dense = matrix({"qweight": qweight, "qzeros": qzeros, "scales": scales}, Quantization("awq", 4, 32)).dequantize()
    assert dense.shape == (8, 64)
    assert dense[6, 0] == (15 - 3) * 0.25 and dense[6, 1] == (0 - 3) * 0.25
    assert dense[1, 40] == (9 - 5) * 2 and dense[1, 41] == (0 - 5) * 2 and dense[1, 0] == 0
    assert dense.count_nonzero() == 64  # column 6 in group 0, column 1 in group 1


def test_desc_act_groups_are_those_of_g_idx() -> None:
    g_idx = torch.tensor([1, 0] * 32, dtype=torch.int32)
    qweight = torch.full((8, 8), 0x11111111, dtype=torch.int32)
    scales = torch.tensor([[1.0], [3.0]]).half().expand(2, 8).contiguous()
    qzeros = torch.full((2, 1), int32(0xFFFFFFFF)[0], dtype=torch.int32)  # zero 0 in format v1
    found = matrix(
        {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}, Quantization("gptq", 4, 32, 1)
    )
    assert found.dequantize()[0].tolist() == [3.0, 1.0] * 32
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(QuantizedProduct([found])(x), x @ found.dequantize().T)


def test_q4_0_q4_1_and_q8_0_blocks_by_hand() -> None:
    half = np.array([0.5, -2.0], dtype=np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (15 - np.arange(16, dtype=np.uint8)) << 4
    values = np.concatenate((np.arange(16), 15 - np.arange(16))).astype(np.float32)
    q4_0 = quantized_blocks(np.concatenate((half[:2], nibbles)), "Q4_0", 1)
    assert q4_0.dequantize()[0].tolist() == (0.5 * (values - 8)).tolist()
    q4_1 = quantized_blocks(np.concatenate((half, nibbles)), "Q4_1", 1)
    assert q4_1.dequantize()[0].tolist() == (0.5 * values - 2).tolist()
    signed = np.arange(-16, 16, dtype=np.int8)
    q8_0 = quantized_blocks(np.concatenate((half[:2], signed.view(np.uint8))), "Q8_0", 1)
    assert q8_0.dequantize()[0].tolist() == (0.5 * signed.astype(np.float32)).tolist()


LAYERS = {
    "awq": ("awq", {}),
    "gptq 4 sym": ("gptq", {"sym": True}),
    "gptq 4 asym v2": ("gptq", {"v2": True}),
    "gptq 4 desc_act": ("gptq", {"desc_act": True}),
    "gptq 8": ("gptq", {"bits": 8}),
    "gptq 8 sym desc_act": ("gptq", {"bits": 8, "sym": True, "desc_act": True}),
    "pack-quantized": ("pack-quantized", {"sym": True}),
    "pack-quantized asym g_idx": ("pack-quantized", {"desc_act": True}),
    "fp8 tensor": ("fp8-tensor", {}),
    "fp8 channel": ("fp8-channel", {}),
    "fp8 block": ("fp8-block", {}),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("group_size", [32, 96, -1])
def test_a_layer_equals_the_formula_in_float64(device: str, case: str, group_size: int) -> None:
    method, options = LAYERS[case]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, 192, generator=generator) for n in (64, 40)]
    quantization = Quantization(
        "fp8" if method.startswith("fp8") else method, options.get("bits", 4), group_size, 0 if options.get("v2") else 1
    )
    parts, dense = [], []
    for weight in weights:
        tensors, values = quantize(method, weight, group_size, **options)
        parts.append(matrix(tensors, quantization).to(torch.device(device)))
        dense.append(values.double())
        torch.testing.assert_close(parts[-1].dequantize().cpu().double(), values.double(), rtol=3e-7, atol=1e-7)
    dtype, tolerance = (torch.float32, 2e-6) if device == "cpu" else (torch.float16, 1e-3)
    whole, product = torch.cat(dense), QuantizedProduct(parts)
    for rows in (1, 7, 130):  # 130: on a GPU the weight becomes floats first
        x = torch.randn(rows, 192, generator=generator).to(dtype)
        out = product(x.to(device)).cpu().double()
        bound = tolerance * x.double().norm(dim=1, keepdim=True) * whole.norm(dim=1)[None]
        assert bool(((out - x.double() @ whole.T).abs() <= bound).all())
    assert product.out_features == 104


def test_matrices_of_different_orders_are_products_of_their_own() -> None:
    generator = torch.Generator().manual_seed(1)
    made = [quantize("gptq", torch.randn(n, 64, generator=generator), 32, desc_act=True, seed=n) for n in (32, 48, 16)]
    parts = [matrix(tensors, Quantization("gptq", 4, 32, 1)) for tensors, _ in made]
    x = torch.randn(3, 64, generator=generator)
    torch.testing.assert_close(QuantizedProduct(parts)(x), x @ torch.cat([values for _, values in made]).T)


@pytest.mark.parametrize(("n", "k"), [(64, 96), (8, 32), (72, 128), (136, 160)])
def test_k26_awq_widths_that_are_no_multiple_of_128(device: str, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, values = quantize("awq", torch.randn(n, k, generator=generator), 32)
    dtype, tolerance = (torch.float32, 1e-4) if device == "cpu" else (torch.float16, 1e-2)
    x = torch.randn(2, k, generator=generator).to(dtype)
    product = QuantizedProduct([matrix(tensors, Quantization("awq", 4, 32)).to(torch.device(device))])
    torch.testing.assert_close(
        product(x.to(device)).cpu().float(), x.float() @ values.T, rtol=tolerance, atol=tolerance
    )


def test_k26_an_awq_depth_that_is_no_multiple_of_the_group_is_refused() -> None:
    tensors, _ = quantize("awq", torch.randn(64, 96), 32)
    with pytest.raises(LoadError, match="K = 96.* no multiple of group_size = 40"):
        matrix(tensors, Quantization("awq", 4, 40))
