"""A mixture of experts on a GPU: the grouped product with experts that nobody chose, and in a graph."""

from __future__ import annotations

import pytest
import torch

from tests.layers.test_moe import HIDDEN, direct, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 40, 300])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_output_is_the_weighted_sum_of_the_best_experts(
    gpu: str, grouped: bool, num_tokens: int, skewed: bool
) -> None:
    """Skewed: every token goes to the same experts. Tokens near a tie, which rounding may turn, are left out."""
    layer, weights = make(torch.bfloat16, grouped=grouped, normalize=True, k=2, device=gpu)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    if skewed:
        x += 4 * weights[0][1].float().cpu() / weights[0][1].float().cpu().norm()
    x = x.bfloat16()
    scores = (x.double() @ weights[0].double().cpu().T).sort(dim=-1, descending=True).values
    clear = scores[:, 1] - scores[:, 2] > 0.05
    expected = direct(x[clear], [w.cpu() for w in weights], True, 2)
    out = layer(x.to(gpu), torch.empty(num_tokens, 0)).cpu()[clear]
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)


def test_a_graph_sends_tokens_to_other_experts_than_when_it_was_captured(gpu: str) -> None:
    if gpu != "cuda":
        pytest.skip("captures a CUDA graph")
    layer, _ = make(torch.bfloat16, grouped=True, normalize=False, k=2, device=gpu)
    gated = torch.empty(24, 0, device=gpu)
    x = torch.zeros(24, HIDDEN, device=gpu, dtype=torch.bfloat16)
    layer(x, gated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, gated)
    for seed in range(4):
        x.copy_(torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(captured, layer(x, gated))
