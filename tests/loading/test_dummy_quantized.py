"""Dummies with quantised matrices: packed, uniform, the same always, and the model that dequantising gives."""

from __future__ import annotations

import torch

from research_engine.loading import load_model, resolve_model
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.loading.dummy_quantized import DummyQuantizedCheckpoint
from tests.models.paged_run import PagedRun

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.down_proj.weight"


def load(packing: str) -> object:
    return load_model(
        resolve_model("dummy:tiny-awq"), dtype=torch.float32, device="cpu", progress=False, weight_packing=packing
    )


def test_packed_and_dequantised_dummies_are_one_model() -> None:
    ids = list(range(40))
    packed, dense = (PagedRun(load(p), 1, 48).step([ids])[0] for p in ("packed", "dequantized"))  # type: ignore[arg-type]
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-4)


def test_matrices_are_uniform_of_variance_one_by_fan_in() -> None:
    checkpoint = DummyQuantizedCheckpoint("dummy:tiny-awq", DUMMY_MODELS["dummy:tiny-awq"].config, 0)
    matrix = checkpoint.quantized(NAME, CPU)
    assert matrix is not None and matrix.values.shape == (128, 256) and matrix.scales.shape == (8, 128)
    assert matrix.values.unique().tolist() == list(range(16))
    assert abs(float(matrix.dequantize().var()) * 256 - 1) < 0.05
    again = checkpoint.quantized(NAME, CPU)
    assert again is not None and torch.equal(again.values, matrix.values)
    assert checkpoint.quantized("model.embed_tokens.weight", CPU) is None


def test_large_dummies_have_their_own_widths() -> None:
    for name, bits in (("dummy:llama-3.1-8b-awq", 4), ("dummy:llama-3.1-8b-fp8", 8)):
        quantization = DUMMY_MODELS[name].config.quantization
        assert quantization is not None and quantization.bits == bits
