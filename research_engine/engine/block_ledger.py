"""What-if account of KV blocks: what a plan's preemptions and grants would cost, in order, without changing anything.

Policies use it to plan and the KV cache uses it to check the plan, so that both count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .request import RUNNING, Request, Status

if TYPE_CHECKING:
    from .contract import PreemptionMode
    from .kv_cache import KVCache


class BlockLedger:
    """Free blocks after the preemptions and grants entered so far."""

    __slots__ = ("_block_size", "_blocks_for", "_cache", "_delta", "_refs", "free_blocks", "free_host_blocks")

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._refs = cache._refs
        self._block_size = cache.block_size
        self._blocks_for = cache.blocks_for
        self._delta: dict[int, int] = {}  # block -> change of its reference count; absent means none
        self.free_blocks = cache.num_free_blocks
        self.free_host_blocks = cache.num_free_host_blocks

    def copy(self) -> BlockLedger:
        """An account of its own that begins where this one is, for trying something out."""
        other = BlockLedger(self._cache)
        other._delta = dict(self._delta)
        other.free_blocks, other.free_host_blocks = self.free_blocks, self.free_host_blocks
        return other

    def can_swap(self, request: Request) -> bool:
        """Whether the host has room for this running request's tokens."""
        return self._cache.blocks_to_swap(request) <= self.free_host_blocks

    def preempt(self, request: Request, mode: PreemptionMode = "recompute") -> None:
        """Enter a preemption. For `swap` ask `can_swap` first."""
        delta, refs = self._delta, self._refs
        for block in request._block_ids:
            change = delta[block] = delta.get(block, 0) - 1
            if refs[block] + change == 0:
                self.free_blocks += 1
        if mode == "swap":
            self.free_host_blocks -= self._cache.blocks_to_swap(request)

    def cost(self, request: Request, num_tokens: int) -> int:
        """Free blocks that `num_tokens` more of its tokens would take, admission and copy on write included."""
        blocks: Sequence[int]
        if request._status is RUNNING:
            blocks, start = request._block_ids, request._computed
            end = start + num_tokens
            need = 0 if end <= len(blocks) * self._block_size else self._blocks_for(request, end) - len(blocks)
        elif request._status is Status.SWAPPED:
            return self._blocks_for(request, request._computed + num_tokens)
        else:
            blocks, start = self._cache.find_hit(request)
            refs, delta = self._refs, self._delta
            need = sum(1 for block in blocks if refs[block] + delta.get(block, 0) == 0)
            need += self._blocks_for(request, start + num_tokens) - len(blocks)
        written = start // self._block_size
        if written < len(blocks):
            block = blocks[written]
            holders = self._refs[block] + self._delta.get(block, 0)
            if request._status is not Status.RUNNING:
                holders += 1
            if holders > 1:
                need += 1
        return need

    def grant(self, request: Request, num_tokens: int) -> bool:
        """Enter `num_tokens` more tokens for a request if the blocks suffice; says whether they did."""
        if request._status is RUNNING and not self._delta:  # nearly every call: a decode in a plan without moves
            start, blocks, size = request._computed, request._block_ids, self._block_size
            held = len(blocks)
            written = start // size
            if written >= held or self._refs[blocks[written]] == 1:
                if start + num_tokens <= held * size:
                    return True
                need = self._blocks_for(request, start + num_tokens) - held
                if need > self.free_blocks:
                    return False
                self.free_blocks -= need
                return True
        need = self.cost(request, num_tokens)
        if need > self.free_blocks:
            return False
        self.free_blocks -= need
        self._hold(request)
        return True

    def _hold(self, request: Request) -> None:
        """Enter the references that the grant makes and, on copy on write, drops."""
        delta = self._delta
        if request._status is Status.WAITING:
            blocks, start = self._cache.find_hit(request)
            for block in blocks:
                delta[block] = delta.get(block, 0) + 1
        elif request._status is Status.RUNNING:
            blocks, start = request._block_ids, request._computed
        else:
            return  # its host blocks are free only once the step's swap-ins are done
        written = start // self._block_size
        if written < len(blocks):
            block = blocks[written]
            if self._refs[block] + delta.get(block, 0) > 1:
                delta[block] = delta.get(block, 0) - 1
