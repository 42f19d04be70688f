"""Orca as the PagedAttention paper runs it: memory out of a buddy allocator, in which free chunks may lie apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Request
from schedulers.base import PolicyScheduler


class BuddyAllocator:
    """Chunks of a power of two of blocks, each at a multiple of its size (Knuth, The Art of Computer Programming, 2.5).

    The whole is cut from its beginning into as many of the largest chunks as there is room for, then smaller ones.

    Args:
        num_blocks: in the whole.
        largest: blocks of the largest chunk, a power of two.
    """

    def __init__(self, num_blocks: int, largest: int) -> None:
        self.largest = largest
        self._free: dict[int, list[int]] = {}
        start, size = 0, largest
        while size:
            self._free[size] = []
            while start + size <= num_blocks:
                self._free[size].append(start)
                start += size
            size //= 2

    def take(self, blocks: int) -> tuple[int, int] | None:
        """The start and size of the smallest chunk that holds so many blocks, split off a larger one if need be.

        None where no free chunk is large enough, though smaller ones together may be.
        """
        wanted = 1 << (blocks - 1).bit_length()
        size = wanted
        while not self._free.get(size):
            size *= 2
            if size > self.largest:
                return None
        start = self._free[size].pop()
        while size > wanted:
            size //= 2
            self._free[size].append(start + size)
        return start, wanted

    def give_back(self, start: int, size: int) -> None:
        """Free a chunk, and join it with its other half for as long as that is free too."""
        while size < self.largest and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].append(start)


@dataclass(kw_only=True)
class OrcaBuddy(PolicyScheduler):
    """By arrival, whoever runs; a request joins when there is a chunk in one piece for all that it is to hold.

    How much that is the engine's reservation says (`reserve_max`, `buddy_pow2`, `buddy_oracle`), so nobody is
    preempted. The largest chunk is that of max_model_len. Waiting bound: nobody who arrives later is admitted before a
    request.
    """

    watermark: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chunks: BuddyAllocator | None = None
        self._held: dict[str, tuple[int, int]] = {}

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        if self._chunks is None:
            longest = -(-view.config.max_model_len // view.block_size)
            self._chunks = BuddyAllocator(view.num_blocks, 1 << (longest - 1).bit_length())
        ledger = view.ledger() if view.num_waiting else None
        for request in self.newcomers(view):
            assert ledger is not None
            chunk = self._chunks.take(ledger.cost(request, view.uncomputed_tokens(request)))
            if chunk is None:
                self.rest = "waits: no free chunk is large enough"
                return
            yield request
            if request.id not in self.planned:
                self._chunks.give_back(*chunk)
                return
            self._held[request.id] = chunk

    def on_finish(self, request: Request) -> None:
        chunk = self._held.pop(request.id, None)
        if chunk is not None:
            assert self._chunks is not None
            self._chunks.give_back(*chunk)
