"""Mapped weights to a GPU through two pieces of pinned memory: all cores fill one while the other is on its way.

Copied straight from the mapping, the driver's one thread takes every page fault and fills a buffer of its own.
"""

from __future__ import annotations

import torch

_PIECE = 64 << 20
_LEAST = 1 << 20  # bytes of a tensor that this pays for


class PinnedCopies:
    """Copies host tensors to a CUDA device. Memory is taken at the first call that needs it, and kept."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device, made by copies on the current stream that may still be under way."""
        if device.type != "cuda" or tensor.nbytes < _LEAST or not tensor.is_contiguous():
            return tensor.to(device)
        if not self._pieces:
            self._pieces = [
                (torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        out = torch.empty_like(tensor, device=device)
        source, target = (side.view(-1).view(torch.uint8) for side in (tensor, out))
        for begin in range(0, len(source), _PIECE):
            memory, copied = self._pieces[self._turn]
            self._turn = 1 - self._turn
            copied.synchronize()  # of the copy that last left from here
            piece = source[begin : begin + _PIECE]
            target[begin : begin + _PIECE].copy_(memory[: len(piece)].copy_(piece), non_blocking=True)
            copied.record()
        return out
