"""The paged KV cache's books: which block holds what, for whom. No tensors; executors move the data as the batch says.

      block table of a request      reference counts          where a block is
      [ 7 | 3 | 9 ]            ->   refs[7] = 2 (shared)      used       refs > 0
        |   |   `- tail, partly     refs[3] = 1               evictable  refs = 0, contents kept for the prefix cache
        |   `----- full             refs[9] = 1               free       refs = 0, contents worthless
        `--------- full, its digest published               and used + evictable + free = num_blocks, always

Full blocks are named by a hash chain over their tokens (a block's digest covers all tokens before it, too). A digest is
published only after the block was computed. Blocks of refs 0 are reused at once: free ones first, then the evictable
one released longest ago, a request's tail before its head. A block with several holders is copied before it is written,
and a published one is never written.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .block_ledger import BlockLedger
from .config import EngineConfig
from .contract import Batch, Preemption, PreemptionRecord, ScheduledRequest, SchedulePlan
from .errors import IntegrityError
from .plan_rules import check_plan
from .request import RUNNING, Request, Status
from .reservation import blocks_for

_BLOCKS_CHECKED_PER_STEP = 4


class KVCache:
    """Blocks, references, prefix cache; turns a SchedulePlan into a Batch or refuses it whole.

    Args:
        config: num_blocks, block_size, num_host_blocks, reservation, enable_prefix_caching and the limits are read.

    Attributes:
        balances_later: the step that leaves the engine idle does not balance the books, for somebody waits for its
            tokens; who set this calls `balance_if_earned` afterwards.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.blocks_for = blocks_for(config)
        self._prefix_caching = config.enable_prefix_caching
        self._refs = [0] * config.num_blocks
        self._digest_of: list[bytes | None] = [None] * config.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(config.num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._free_host = list(range(config.num_host_blocks - 1, -1, -1))
        self.num_running = 0  # requests that hold device blocks
        self._tokens_held = 0  # computed tokens of running requests, shared ones counted for each
        self._extra_refs = 0  # sum over blocks of refs - 1 where positive; only full blocks stay shared
        self.num_evictions = 0
        self.balances_later = False
        self._steps_unchecked = 0  # since the books were last balanced

    # What is there.

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody uses and whose contents are kept for the prefix cache."""
        return len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free) - len(self._evictable)

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host)

    @property
    def slots_stored(self) -> int:
        """Slots of used blocks that hold a token, shared ones counted once."""
        return self._tokens_held - self._extra_refs * self.block_size

    @property
    def reserves(self) -> bool:
        """Whether requests hold blocks for tokens to come."""
        return self._config.reservation != "paged"

    def ledger(self) -> BlockLedger:
        return BlockLedger(self)

    def blocks_freed_by(self, request: Request) -> int:
        """Blocks that only this request holds."""
        refs = self._refs
        return sum(1 for block in request._block_ids if refs[block] == 1)

    def blocks_to_swap(self, request: Request) -> int:
        """Host blocks that a swap of this running request takes: those that hold its tokens, not reserved ones."""
        return -(-request._computed // self.block_size)

    # Prefix hits.

    def find_hit(self, request: Request) -> tuple[Sequence[int], int]:
        """Computed blocks that a waiting request may start with, and how many of its tokens they hold.

        Looked up anew at every call. At least one token is left to compute, for its logits. Does not change the cache.
        """
        if request._arriving:
            return (), request._arriving  # takes blocks of its own, which its KV is brought into
        sibling = request.sibling
        shared = request._num_prompt - 1
        drew_none = request._computed == 0 and len(request._tokens) == request._num_prompt
        if sibling is not None and sibling._status is RUNNING and sibling._computed > shared and drew_none:
            whole = shared // self.block_size
            if sibling._published > whole:  # others may find that block, so it must not be written: leave it out
                return sibling._block_ids[:whole], whole * self.block_size
            return sibling._block_ids[: whole + 1], shared
        if not self._prefix_caching or request.sampling.prompt_logprobs is not None:
            return (), 0
        most = (len(request._tokens) - 1) // self.block_size
        blocks: list[int] = []
        for digest in self._digests(request, most):
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def cached_tokens(self, request: Request) -> int:
        """Tokens that an admission now would not have to compute."""
        if request._status is Status.WAITING:
            return self.find_hit(request)[1]
        return request._computed

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hash chain over the request's first full blocks."""
        digests, size, tokens = request._digests, self.block_size, request._tokens
        while len(digests) < num_blocks:
            at = len(digests) * size
            parent = digests[-1] if digests else b""
            block = array("q", tokens[at : at + size]).tobytes()
            digests.append(hashlib.blake2b(parent + block, digest_size=16).digest())
        return digests if len(digests) == num_blocks else digests[:num_blocks]

    def advance(self, request: Request, num_tokens: int) -> bool:
        """Count tokens of a running request as computed, once their step is handed over; publishes full blocks.

        Returns:
            Whether it is further than it ever was; what lies below that was computed again.
        """
        before = request._computed
        computed = request._computed = before + num_tokens
        self._tokens_held += num_tokens
        full = computed // self.block_size
        if full > request._published and self._prefix_caching:
            self._publish(request, full)
        peak = request._peak_computed
        if computed <= peak:
            request._recomputed += num_tokens
            return False
        if peak > before:
            request._recomputed += peak - before
        request._peak_computed = computed
        return True

    def _publish(self, request: Request, full: int) -> None:
        digests = self._digests(request, full)
        for index in range(request._published, full):
            block, digest = request._block_ids[index], digests[index]
            if self._digest_of[block] is None and digest not in self._block_of:
                self._digest_of[block] = digest
                self._block_of[digest] = block
        request._published = full

    def reset_prefix_cache(self) -> None:
        """Forget every published block; blocks in use stay in use."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks

    # Commit: all or nothing.

    def commit(self, plan: SchedulePlan, requests: Mapping[str, Request], step: int) -> Batch:
        """Check the plan against every rule, then carry it out.

        Args:
            plan: from a scheduler, trusted in nothing.
            requests: live requests by id.
            step: number of the step, for messages.

        Raises:
            PlanError: a rule was broken, which the message names; nothing was changed.
        """
        if type(plan.tokens) is not dict and isinstance(plan.tokens, Mapping):  # it might answer otherwise next time
            plan = replace(plan, tokens=dict(plan.tokens.items()))
        check_plan(plan, requests, self, self._config, step)
        batch, new_row = Batch(step, [], 0), tuple.__new__  # half the cost of calling a NamedTuple
        refs, size, append, row = self._refs, self.block_size, batch.rows.append, ScheduledRequest
        hits = {}  # claimed before anything is released or handed out, so that no hit can be lost to the plan itself
        if self.num_running < len(requests):
            waiting = Status.WAITING
            hits = {r.id: self._claim(r) for name in plan.tokens if (r := requests[name])._status is waiting}
        for preemption in plan.preempt:
            batch.preempted.append(self._preempt(requests[preemption.request_id], preemption, batch))
        total = 0
        for name, num_tokens in plan.tokens.items():
            request = requests[name]
            if request._status is RUNNING:
                blocks = request._block_ids
                changed = held = len(blocks)
            else:
                self._admit(request, hits, batch)
                blocks = request._block_ids
                self._grow(request, request._computed + num_tokens)
                changed, held = 0, len(blocks)
            start = request._computed
            end, written = start + num_tokens, start // size
            if written < held and refs[blocks[written]] > 1:
                self._copy_on_write(blocks, written, start % size, batch)
                changed = min(changed, written)
            if end > held * size:
                self._grow(request, end)
            append(new_row(row, (request, start, num_tokens, end == len(request._tokens), changed)))
            total += num_tokens
        batch.num_tokens = total
        return batch

    def release(self, request: Request) -> None:
        """Give back all that a request holds, on the device and on the host. Its published blocks stay findable."""
        if request._status is Status.RUNNING:
            self._drop_blocks(request)
        self._free_host.extend(request._host_block_ids)
        request._host_block_ids = []

    def _claim(self, request: Request) -> tuple[Sequence[int], int]:
        blocks, num_tokens = self.find_hit(request)
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._evictable[block]
            else:
                self._extra_refs += 1
            refs[block] += 1
        return blocks, num_tokens

    def _admit(self, request: Request, hits: Mapping[str, tuple[Sequence[int], int]], batch: Batch) -> None:
        if request._status is Status.SWAPPED:
            host, request._host_block_ids = request._host_block_ids, []
            request._block_ids = [self._take() for _ in host]
            batch.swap_in.extend(zip(host, request._block_ids, strict=True))
            self._free_host.extend(host)
        else:
            blocks, num_tokens = hits[request.id]
            request._block_ids = list(blocks)
            request._computed = num_tokens
            request._published = min(len(blocks), num_tokens // self.block_size)
            if request._arriving:
                batch.received.append((request, num_tokens))
                request._arriving = 0
            elif request._first_scheduled_time is None:
                request._cached_tokens = num_tokens
        request._status = Status.RUNNING
        self.num_running += 1
        self._tokens_held += request._computed
        batch.admitted.append(request)

    def _preempt(self, request: Request, preemption: Preemption, batch: Batch) -> PreemptionRecord:
        freed, computed = self.blocks_freed_by(request), request._computed
        blocks = request._block_ids
        swaps, moved = preemption.mode == "swap", 0
        self._drop_blocks(request)
        request._preemptions += 1
        if swaps:
            moved = -(-computed // self.block_size)
            request._host_block_ids = [self._free_host.pop() for _ in range(moved)]
            batch.swap_out.extend(zip(blocks[:moved], request._host_block_ids, strict=True))
            request._status = Status.SWAPPED
        else:
            request._computed = 0
            request._status = Status.WAITING
        lost = 0 if swaps else computed
        return PreemptionRecord(request.id, preemption.mode, preemption.reason, freed, lost, moved)

    def _drop_blocks(self, request: Request) -> None:
        refs = self._refs
        for block in reversed(request._block_ids):  # the tail becomes evictable before the head it depends on
            refs[block] -= 1
            if refs[block]:
                self._extra_refs -= 1
            elif self._digest_of[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
        self.num_running -= 1
        self._tokens_held -= request._computed
        request._block_ids = []
        request._published = 0

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Take the blocks that it must hold to have that many tokens computed."""
        blocks = request._block_ids
        for _ in range(self.blocks_for(request, num_tokens) - len(blocks)):
            blocks.append(self._take())

    def _take(self) -> int:
        """A block for one new holder; evicts a cached one when none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            digest, self._digest_of[block] = self._digest_of[block], None
            assert digest is not None
            del self._block_of[digest]
            self.num_evictions += 1
        self._refs[block] = 1
        return block

    def _copy_on_write(self, blocks: list[int], index: int, num_filled: int, batch: Batch) -> None:
        shared, own = blocks[index], self._take()
        if num_filled:
            batch.copies.append((shared, own))
        blocks[index] = own
        self._refs[shared] -= 1
        self._extra_refs -= 1

    # Invariants.

    def balance_when_due(self, live: Mapping[str, Request]) -> None:
        """Called after every step: `check_integrity` where the configuration wants it always, otherwise when idle."""
        self._steps_unchecked += 1
        if self._config.check_integrity:
            self.check_integrity(live.values())
        elif not live and not self.balances_later:
            self.balance_if_earned()

    def balance_if_earned(self) -> None:
        """`check_integrity` of an idle engine; it reads every block, so only once so many steps have earned it."""
        if self._steps_unchecked * _BLOCKS_CHECKED_PER_STEP >= self.num_blocks:
            self._steps_unchecked = 0
            self.check_integrity(())

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Balance the books: every block is used, evictable or free, once; every reference has its holder.

        Raises:
            IntegrityError: naming the block or request that does not add up.
        """
        refs: Counter[int] = Counter()
        host: list[int] = list(self._free_host)
        holders = held = 0
        for request in requests:
            host.extend(request._host_block_ids)
            refs.update(request._block_ids)
            computed = 0 if request._status is Status.WAITING else request._computed
            held_ids = request._block_ids
            slots = (len(held_ids) + len(request._host_block_ids)) * self.block_size
            if slots < computed or len(set(held_ids)) != len(held_ids):
                raise IntegrityError(f"{request!r} has blocks {held_ids}: too few for its tokens, or one twice")
            if request._status is Status.RUNNING:
                holders += 1
                held += request._computed
            elif request._block_ids:
                raise IntegrityError(f"{request!r} holds device blocks {request._block_ids} without running")
        counts = dict(enumerate(self._refs)) if len(refs) + self._refs.count(0) != self.num_blocks else refs
        for block in counts:  # all of them only if one is wrong: block by block takes several times as long
            count = self._refs[block] if 0 <= block < self.num_blocks else 0
            if refs[block] != count:
                raise IntegrityError(f"block {block} has reference count {count}, but {refs[block]} holders")
        everywhere = [*self._free, *self._evictable, *refs]
        distinct = len(set(everywhere)) == len(everywhere) == self.num_blocks
        if not distinct or min(everywhere) < 0 or max(everywhere) >= self.num_blocks:
            raise IntegrityError(f"used, evictable and free blocks do not add up to {self.num_blocks} distinct ones")
        if sorted(host) != list(range(self._config.num_host_blocks)):
            raise IntegrityError(f"host blocks do not add up to {self._config.num_host_blocks} distinct ones")
        published = set(self._block_of.values())
        if len(self._block_of) != self.num_blocks - self._digest_of.count(None) or any(
            self._digest_of[block] != digest for digest, block in self._block_of.items()
        ):
            raise IntegrityError("published blocks and digests are not one to one")
        if not published.isdisjoint(self._free) or not published.issuperset(self._evictable):
            raise IntegrityError("free blocks must be unpublished and evictable ones published")
        extra = sum(count - 1 for count in refs.values())
        if (holders, held, extra) != (self.num_running, self._tokens_held, self._extra_refs):
            raise IntegrityError(
                f"running requests, their tokens, extra references are {(holders, held, extra)}; "
                f"the books say {(self.num_running, self._tokens_held, self._extra_refs)}"
            )
