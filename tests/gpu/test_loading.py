"""Weights reach a GPU whole, through pinned memory in pieces that are used again and again."""

from __future__ import annotations

import pytest
import torch

from research_engine.loading import pinned

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_copies_in_pieces_are_the_tensors(gpu: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no multiple of a piece, without waiting for the copies between them."""
    monkeypatch.setattr(pinned, "_PIECE", 4096)
    monkeypatch.setattr(pinned, "_LEAST", 1)
    copies, generator = pinned.PinnedCopies(), torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 120, (rows, 33), dtype=torch.uint8, generator=generator).to(dtype)
        for rows in (1, 31, 500, 4000)
    ]
    on_device = [copies(tensor, torch.device(gpu)) for tensor in tensors]
    for tensor, copy in zip(tensors, on_device, strict=True):
        assert copy.device.type == gpu and copy.shape == tensor.shape
        assert torch.equal(copy.cpu().view(torch.uint8), tensor.view(torch.uint8))
