"""A linear layer is the product with its weight for any number of rows, by whichever kernel serves so many."""

from __future__ import annotations

import pytest
import torch

from research_engine.kernels import reference
from research_engine.layers.linear import GateUpLinear, Linear

ROWS = (0, 1, 5, 16, 17, 40, 64, 65)


def matrix(rows: int, columns: int, device: str) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (values * columns**-0.5).to(device, torch.bfloat16)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "depth"), [(96, 64), (96, 100), (576, 1536)])
def test_a_packed_layer_is_the_product(device: str, rows: int, columns: int, depth: int) -> None:
    weight, bias, x = matrix(columns, depth, device), matrix(1, columns, device)[0], matrix(rows, depth, device)
    layer = Linear(weight.clone(), bias)
    layer.pack()
    assert_close(layer(x), reference.skinny_gemm(x, weight, bias))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_and_up_give_the_activated_product(device: str, rows: int, activation: str) -> None:
    weight, x = matrix(96, 64, device), matrix(rows, 64, device)
    layer, out = GateUpLinear(weight.clone()), torch.full((rows, 48), torch.nan, dtype=torch.bfloat16, device=device)
    layer.pack()
    assert layer.gated(activation, x, out) is out
    gate, up = reference.skinny_gemm(x, weight).chunk(2, dim=1)
    assert_close(out, (torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu)(gate) * up)


def test_rows_computed_so_many_at_a_time_do_not_depend_on_the_others(device: str) -> None:
    layer, x = GateUpLinear(matrix(96, 64, device)), matrix(40, 64, device)
    layer.pack()
    layer.rows_at_once = 32
    out, alone = (torch.empty(rows, 48, dtype=torch.bfloat16, device=device) for rows in (40, 1))
    assert torch.equal(layer.gated("silu", x, out)[7:8], layer.gated("silu", x[7:8], alone))
    assert torch.equal(layer(x)[7:8], layer(x[7:8]))
