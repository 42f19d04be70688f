"""Random small workloads on a random small engine, driven to the end: arrivals, aborts anywhere, ids used again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from research_engine.engine.config import OnFault
from research_engine.engine.contract import Request, Scheduler
from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.engine import Engine
from research_engine.engine.reservation import Reservation
from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.token_output import TokenOutput

from .shadow import VOCABULARY, ManualClock, assert_empty, expected, make_engine


class RandomRun:
    """One engine, its workload and what came out of it.

    Args:
        seed: of everything random.
        policy: makes the scheduler from a random generator.
        aborts: probability of an abort per step.
        reservation: of the engine.
        decisions: where the scheduler's decisions are taken down.
        on_fault: of the engine.
        overlap: whether a step is handed over while the one before it runs.
    """

    def __init__(
        self,
        seed: int,
        policy: Callable[[random.Random], Scheduler],
        aborts: float = 0.08,
        reservation: Reservation = "paged",
        decisions: DecisionLog | None = None,
        on_fault: OnFault = "stop",
        overlap: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.aborts = aborts
        self.reservation = reservation
        self.hints = random.Random(seed)  # of what only policies look at, so that it changes nothing else of the run
        size = rng.randint(1, 8)
        blocks = rng.randint(3, 12) if size > 2 else rng.randint(8, 24)
        slots = blocks * size
        longest = slots if reservation == "paged" else rng.choice([slots, slots // 2, slots // 3])
        self.engine: Engine = make_engine(
            policy(rng),
            clock=ManualClock(tick=0.01),
            num_blocks=blocks,
            block_size=size,
            num_host_blocks=rng.choice([0, rng.randint(1, blocks), 2 * blocks]),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(1, 40),
            max_model_len=max(2, longest + rng.randint(-2, 4)),
            enable_prefix_caching=rng.random() < 0.8,
            eos_token_ids=(rng.randrange(VOCABULARY),),
            vocab_size=VOCABULARY,
            stall_limit=3000,
            reservation=reservation,
            decisions=decisions,
            on_fault=on_fault,
            overlap=overlap,
        )
        self.slots = slots
        self.families = [[rng.randrange(VOCABULARY) for _ in range(slots)] for _ in range(2)]
        self.to_add = rng.randint(2, 7)
        self.added = 0
        self.live: list[str] = []
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()
        self.outputs: dict[Request, list[TokenOutput]] = {}

    def prompt(self, length: int) -> list[int]:
        """A prompt that shares a prefix of random length with others."""
        shared = self.rng.choice([0, self.rng.randint(0, length), length])
        family = self.rng.choice(self.families)
        return [*family[:shared], *(self.rng.randrange(VOCABULARY) for _ in range(length - shared))]

    def add(self, request_id: str) -> None:
        rng = self.rng
        longest = min(self.slots, self.engine.config.max_model_len - 1)
        length = rng.randint(1, min(longest, rng.choice([4, 12, 40])))
        room = min(self.slots - length + 1, self.engine.config.max_model_len - length)
        most = rng.randint(1, min(room, 8))
        sampling = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            seed=rng.randrange(1000),
            max_tokens=most,
            min_tokens=rng.randint(0, most),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=[rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 3]))],
        )
        predicted = None if self.reservation == "paged" else rng.choice([None, most, rng.randint(0, 10)])
        priority, hints = rng.randint(0, 2), self.hints
        guess = hints.choice([None, hints.randint(0, 12)])
        group = self.engine.add_request(
            request_id,
            self.prompt(length),
            sampling,
            priority=priority,
            client=hints.choice("abc"),
            deadline=hints.choice([None, self.engine.clock.now() + hints.random()]),
            predicted_tokens=guess if self.reservation == "paged" else predicted,
        )
        self.live.append(request_id)
        self.requests += group

    def abort(self) -> None:
        """End a random request wherever it is; sometimes its id comes back at once."""
        if not self.live:
            return
        request_id = self.rng.choice(self.live)
        unfinished = [r for r in self.requests if r.group_id == request_id and r.finish_time is None]
        assert self.engine.abort(request_id) == bool(unfinished)
        assert not self.engine.abort(request_id)
        self.aborted.update(unfinished)
        self.live.remove(request_id)
        if self.rng.random() < 0.5:
            self.add(request_id)

    def step(self) -> None:
        """One iteration in its five parts, with aborts before it and in flight."""
        rng, engine = self.rng, self.engine
        while self.added < self.to_add and rng.random() < 0.4:
            self.add(f"r{self.added}")
            self.added += 1
        if rng.random() < self.aborts:
            self.abort()
        view = engine.view()
        batch = engine.commit(engine.plan(view), view)
        engine.kv_cache.check_integrity(engine.queues.live.values())
        for row in batch.rows:
            written = row.request.block_ids[row.start // engine.config.block_size :]
            assert not any(engine.kv_cache._digest_of[block] for block in written), "a published block is written"
        result = engine.execute(batch)
        if rng.random() < self.aborts:
            self.abort()
        for output in engine.update(batch, result):
            assert output.request not in self.aborted, "a token after the abort"
            self.outputs.setdefault(output.request, []).append(output)

    def finish(self, most: int = 4000) -> None:
        """Run to the end and compare every output with the request's own, undisturbed one."""
        for _ in range(most):
            if self.added == self.to_add and not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "no end in sight"
        assert_empty(self.engine)
        for request in self.requests:
            self.check(request)
        records = {id(record): record for record in self.engine.records.requests}
        assert len(records) == len(self.requests)

    def check(self, request: Request) -> None:
        tokens, reason = expected(request)
        seen = self.outputs.get(request, [])
        assert [output.token_id for output in seen] == request.output_token_ids
        assert request.is_finished
        if request in self.aborted:
            assert request.finish_reason == "abort"
            assert request.output_token_ids == tokens[: request.num_output_tokens]
            assert not any(output.finish_reason for output in seen)
        else:
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
            assert [output.finish_reason for output in seen] == [None] * (len(seen) - 1) + [reason]

    def facts(self) -> dict[str, Any]:
        """What the run went through, so that a test can tell that it went through it at all."""
        steps = self.engine.records.steps
        preemptions = [p for step in steps for p in step.preemptions]
        return {
            "recomputes": sum(p.mode == "recompute" for p in preemptions),
            "swaps": sum(step.blocks_swapped_in for step in steps),
            "copies": sum(step.blocks_copied for step in steps),
            "hits": sum(r.num_cached_tokens > 0 for r in self.requests if r.sibling is None),
            "evictions": self.engine.kv_cache.num_evictions,
            "aborts": len(self.aborted),
            "chunks": sum(not drew for step in steps for drew in step.drew),
        }
