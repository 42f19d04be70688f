"""Every GGUF block format against llama.cpp's own Python package, and against blocks written by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from research_engine.loading.dequantize import GGML_TYPES, dequantize

BY_NAME = {kind.name: (number, kind) for number, kind in GGML_TYPES.items()}


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def weights(name: str, block: bytes) -> torch.Tensor:
    return dequantize(np.frombuffer(block, dtype=np.uint8), BY_NAME[name][1])


@pytest.mark.parametrize("name", BY_NAME)
def test_random_blocks_equal_the_gguf_package(name: str) -> None:
    number, kind = BY_NAME[name]
    raw = np.random.default_rng(0).integers(0, 256, (300, kind.block_bytes), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(number)).reshape(-1)
        ours = dequantize(raw.reshape(-1), kind).numpy()
    np.testing.assert_array_equal(ours, expected)  # bit for bit, NaN where the package has NaN


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantising_and_back_stays_within_half_a_step(name: str) -> None:
    number, kind = BY_NAME[name]
    original = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    raw = gguf.quantize(original, gguf.GGMLQuantizationType(number))
    restored = dequantize(raw.reshape(-1), kind).numpy().reshape(original.shape)
    blocks = original.reshape(-1, 32)
    levels = {"Q4_0": 8, "Q4_1": 15, "Q8_0": 127}[name]
    spread = np.ptp(blocks, axis=1) if name == "Q4_1" else abs(blocks).max(axis=1)
    step = spread / levels
    allowed = step * (1.0 if name == "Q4_0" else 0.5) + 0.01  # Q4_0 has 7 steps on one side only
    assert np.all(abs(restored - original).reshape(-1, 32) <= allowed[:, None])


def test_q4_0_counts_from_minus_eight() -> None:
    block = half(0.5) + bytes(range(0, 256, 16))  # low nibbles 0; high nibbles 0 to 15
    assert weights("Q4_0", block).tolist() == [-4.0] * 16 + [0.5 * (q - 8) for q in range(16)]


def test_q4_1_adds_the_minimum() -> None:
    block = half(2.0) + half(-3.0) + bytes([0x21] * 16)
    assert weights("Q4_1", block).tolist() == [-1.0] * 16 + [1.0] * 16


def test_q8_0_is_signed() -> None:
    block = half(0.25) + bytes([1, 127, 128, 255] * 8)
    assert weights("Q8_0", block).tolist() == [0.25, 31.75, -32.0, -0.25] * 8


def test_q4_k_takes_scales_and_minima_of_six_bits_from_three_places() -> None:
    # scales 1, 2, 3, 4, 17, 34, 51, 63 and minima 5, 6, 7, 8, 62, 45, 28, 11
    scales, minima = [1, 2, 3, 4, 17, 34, 51, 63], [5, 6, 7, 8, 62, 45, 28, 11]
    first = [s | (scales[i + 4] >> 4) << 6 for i, s in enumerate(scales[:4])]
    second = [m | (minima[i + 4] >> 4) << 6 for i, m in enumerate(minima[:4])]
    third = [scales[i] & 15 | (minima[i] & 15) << 4 for i in range(4, 8)]
    block = half(1.0) + half(0.5) + bytes(first + second + third) + bytes([0xA3] * 128)
    expected = [s * (0xA if i % 2 else 0x3) - 0.5 * m for i, (s, m) in enumerate(zip(scales, minima, strict=True))]
    assert weights("Q4_K", block).reshape(8, 32).tolist() == [[float(e)] * 32 for e in expected]


def test_q6_k_joins_low_nibbles_and_high_bits() -> None:
    low = bytes([0x5F] * 128)  # first 64 of each half: 15; next 64: 5
    high = bytes([0b11_10_01_00] * 64)  # runs of 32: +0, +16, +32, +48
    block = low + high + bytes([1] * 8 + [255] * 8) + half(2.0)  # scales 1 in the first half, -1 in the second
    runs = [15 - 32, 15 + 16 - 32, 5 + 32 - 32, 5 + 48 - 32]
    expected = [[2.0 * q] * 32 for q in runs] + [[-2.0 * q] * 32 for q in runs]
    assert weights("Q6_K", block).reshape(8, 32).tolist() == expected


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = torch.tensor([1.0, -2.5, 3.0e38, 1e-40])
    raw = values.to(torch.bfloat16).view(torch.uint8).numpy()
    assert torch.equal(dequantize(raw, BY_NAME["BF16"][1]), values.to(torch.bfloat16).float())


def test_tensors_larger_than_a_chunk_are_dequantised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(2).integers(0, 120, 34 * 50, dtype=np.uint8)
    whole = dequantize(raw, BY_NAME["Q8_0"][1])
    monkeypatch.setattr("research_engine.loading.dequantize._CHUNK_WEIGHTS", 7 * 32)
    assert torch.equal(dequantize(raw, BY_NAME["Q8_0"][1]), whole)
