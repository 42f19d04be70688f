"""A mixture of experts, grouped or one by one, is the weighted sum of its experts' outputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from research_engine.layers.linear import GateUpLinear, Linear
from research_engine.layers.moe import MixtureOfExperts

HIDDEN, INTER, EXPERTS = 32, 48, 5


def make(
    dtype: torch.dtype, *, grouped: bool, normalize: bool, k: int, device: str = "cpu"
) -> tuple[MixtureOfExperts, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    router, gate_up, down = weight(EXPERTS, HIDDEN), weight(EXPERTS, 2 * INTER, HIDDEN), weight(EXPERTS, HIDDEN, INTER)
    layer = MixtureOfExperts(
        Linear(router),
        [GateUpLinear(matrix) for matrix in gate_up],
        [Linear(matrix) for matrix in down],
        experts_per_token=k,
        normalize=normalize,
        activation="silu",
        stacked=(gate_up, down) if grouped else None,
    )
    return layer, [router, gate_up, down]


def direct(x: torch.Tensor, weights: list[torch.Tensor], normalize: bool, k: int) -> torch.Tensor:
    """Token by token in float64."""
    router, gate_up, down = (w.double() for w in weights)
    rows = []
    for row in x.double():
        shares = torch.softmax(router @ row, 0)
        best = sorted(range(EXPERTS), key=lambda e: -float(shares[e]))[:k]
        total = sum(shares[e] for e in best) if normalize else 1.0
        out = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in best:
            gate, up = (gate_up[e] @ row).chunk(2)
            out += shares[e] / total * (down[e] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "k"), [(1, 1), (1, 2), (23, 2), (9, EXPERTS)])
def test_the_output_is_the_weighted_sum_of_the_best_experts(
    grouped: bool, normalize: bool, num_tokens: int, k: int
) -> None:
    layer, weights = make(torch.float32, grouped=grouped, normalize=normalize, k=k)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = direct(x, weights, normalize, k).float()
    torch.testing.assert_close(layer(x, torch.empty(num_tokens, 0)), expected, rtol=1e-5, atol=1e-5)


def test_grouped_products_in_bfloat16_are_those_of_single_experts() -> None:
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    outs = [
        make(torch.bfloat16, grouped=grouped, normalize=True, k=2)[0](x, torch.empty(40, 0))
        for grouped in (True, False)
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)


def test_a_tokens_output_does_not_depend_on_the_tokens_around_it() -> None:
    layer, _ = make(torch.float32, grouped=False, normalize=True, k=2)
    x = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(3))
    whole, order = layer(x, torch.empty(17, 0)), torch.randperm(17, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(layer(x[order], torch.empty(17, 0)), whole[order])
