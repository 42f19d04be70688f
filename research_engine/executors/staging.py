"""The two copies of a step, neither of them waited for: integers to the device in one piece, drawn tokens back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_RING = 3  # steps whose pinned memory may be in use at once: one being written, one being copied, one to spare


class Arrival:
    """Tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._tokens, self._event = tokens, event

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class Staging:
    """Pinned memory in a ring, and the buffer on the device that every step's integers are copied to.

    Args:
        room: int32 elements that one step may send.
        num_tokens: int64 elements that one step may bring back.
        device: on a CPU the copies are plain ones.

    Attributes:
        device_inputs: int32 [room]; graphs read its first elements, so it never moves.
    """

    def __init__(self, room: int, num_tokens: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device_inputs = torch.zeros(room, dtype=torch.int32, device=device)
        self._there = [torch.zeros(room, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_RING)]
        self._back = [torch.zeros(num_tokens, dtype=torch.int64, pin_memory=on_gpu) for _ in range(_RING)]
        self._copied: list[torch.cuda.Event | None] = [torch.cuda.Event() if on_gpu else None for _ in range(_RING)]
        self._arrived: list[torch.cuda.Event | None] = [torch.cuda.Event() if on_gpu else None for _ in range(_RING)]
        self._at = 0

    def send(self, parts: Sequence[Sequence[int] | np.ndarray]) -> list[torch.Tensor]:
        """Copy integers to the device, one part behind the other.

        Returns:
            Views of `device_inputs`, one a part, int32; valid until the next call.

        Raises:
            ValueError: they do not fit.
        """
        self._at = (self._at + 1) % _RING
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        if total > len(self.device_inputs):
            raise ValueError(f"a step of {total} integers; the staging buffer holds {len(self.device_inputs)}")
        event = self._copied[self._at]
        if event is not None:
            event.synchronize()  # of the copy that last used this memory, three steps ago
        memory = self._there[self._at]
        array, at, views = memory.numpy(), 0, []
        for part, length in zip(parts, lengths, strict=True):
            array[at : at + length] = part
            views.append(self.device_inputs[at : at + length])
            at += length
        self.device_inputs[:total].copy_(memory[:total], non_blocking=True)
        if event is not None:
            event.record()
        return views

    def fetch(self, tokens: torch.Tensor) -> Arrival:
        """Begin to copy int64 tokens [R] to the host."""
        memory, event = self._back[self._at][: len(tokens)], self._arrived[self._at]
        memory.copy_(tokens, non_blocking=True)
        if event is not None:
            event.record()
        return Arrival(memory, event)
