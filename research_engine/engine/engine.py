"""The loop: view, schedule, commit, execute, update. Owns the requests and what may happen to them; chooses nothing.

With `config.overlap` step n+1 is scheduled and handed to the executor while step n still runs:

    host     | plan n   | plan n+1 | emit n | plan n+2 | emit n+1 | ...
    device        | step n         | step n+1            | step n+2

A token that is not there yet has its place in the request (UNKNOWN_TOKEN), so a policy sees the same lengths as without
overlap. A request whose last token is under way leaves at once, since its blocks are safe: the device works in order.
One that turns out to have stopped has a row too many in flight, of which nothing is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .clock import MonotonicClock
from .config import EngineConfig
from .contract import Batch, Clock, EngineView, Executor, Pending, SchedulePlan, Scheduler, StepResult
from .decision_log import DecisionLog
from .guards import GuardedPolicy, ProgressGuard
from .kv_cache import KVCache
from .queues import RequestQueues
from .records import Records, RequestRecord, StepRecord
from .request import RUNNING, UNKNOWN_TOKEN, Request, Status
from .request_group import continuation_ids, make_group
from .request_rules import check_facts, check_request
from .sampling_params import SamplingParams
from .structured import TokenConstraint
from .text import DecodeStream
from .token_output import TokenOutput, take_prompt_logprobs, take_token

Answer = TypeVar("Answer")


class Engine:
    """Serves requests step by step.

    Args:
        config: sizes and limits.
        scheduler: the policy.
        executor: computes the batches.
        clock: real or virtual time; a MonotonicClock when None.
        records: where the records of steps and requests go; in memory when None.
        decode_stream: makes a text decoder for a request; None serves token ids alone.
        constrain: makes the constraint of a request with structured_outputs; None refuses those.
        decisions: takes down every decision of the scheduler, for explanations and replay.

    Attributes:
        queues: who runs, waits and is new.
        idle: the last plan held nothing.
        faults: of the policy, that were gone over because of on_fault = "go_on".
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Clock | None = None,
        records: Records | None = None,
        decode_stream: Callable[[SamplingParams], DecodeStream] | None = None,
        constrain: Callable[[SamplingParams], TokenConstraint | None] | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.records = Records() if records is None else records
        self.decisions = decisions
        self.kv_cache = KVCache(config)
        self.queues = RequestQueues()
        self.num_steps = 0
        self.idle = True
        self._policy = GuardedPolicy(scheduler, config)
        self.faults = self._policy.faults
        if decisions is not None:
            decisions.policy = self._policy.name
        self._progress = ProgressGuard(config.stall_limit)
        self._decode_stream, self._constrain = decode_stream, constrain
        self._num_added = 0
        self._in_flight: tuple[Batch, Pending, StepRecord] | None = None  # handed over, its tokens not yet emitted
        self._early: list[TokenOutput] = []  # emitted between two steps

    @property
    def scheduler(self) -> Scheduler:
        return self._policy.scheduler

    @property
    def wake_at(self) -> float | None:
        """Clock seconds until which an idle policy waits; None when it doesn't, or something has happened since."""
        return self._progress.wake_at

    # Requests in and out.

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        predicted_tokens: int | None = None,
        computed_tokens: int = 0,
    ) -> list[Request]:
        """Queue a prompt; returns its continuations: n > 1 are requests `id/0`, `id/1` ... that share its blocks.

        Args:
            arrival_time: scheduled arrival in clock seconds; now when None.
            computed_tokens: leading tokens of the prompt whose KV was computed elsewhere and comes with the request.

        Raises:
            RequestError: it could never be served; says which value breaks which limit. Nothing was queued.
            QueueFullError: max_num_queued requests wait already. Nothing was queued.
        """
        max_tokens = check_request(request_id, prompt_token_ids, sampling, self.config, computed_tokens)
        check_facts(request_id, arrival_time, priority, client, deadline, predicted_tokens)
        self.queues.check(request_id, continuation_ids(request_id, sampling.n), self.config)
        group = make_group(
            request_id, prompt_token_ids, sampling, self.config, first_index=self._num_added, max_tokens=max_tokens,
            arrival_time=self.clock.now() if arrival_time is None else arrival_time, priority=priority, client=client,
            deadline=deadline, predicted_tokens=predicted_tokens, arriving=computed_tokens,
            decode_stream=self._decode_stream, constrain=self._constrain,
        )  # fmt: skip
        self._num_added += len(group)
        self.queues.add(group)
        self._progress.interrupt()
        self._policy.tell("on_arrival", group[0], self.num_steps)
        self._policy.raise_event_error()
        return group

    def abort(self, request_id: str) -> bool:
        """End a request, or all continuations of one, wherever they are; says whether any was still live."""
        group = self.queues.group(request_id)
        for request in group:
            self._finish(request, "abort", self.clock.now())
        self._policy.raise_event_error()
        return bool(group)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queues)

    @property
    def num_unfinished(self) -> int:
        """Requests not yet ended, continuations counted one by one."""
        return self.queues.num_unfinished

    # The loop.

    def step(self) -> list[TokenOutput]:
        """One iteration. Returns the tokens that came out, in batch order; with overlap those of the step before.

        After a step in which the policy chose to wait, it first lets the time pass until `wake_at`.
        """
        self._progress.rest(self.clock)
        view = self.view()
        plan = self.plan(view)
        batch = self.commit(plan, view)
        result = self.execute(batch)
        return self.update(batch, result)

    def view(self) -> EngineView:
        queues = self.queues
        if self._in_flight is not None and any(r.sampling.needs_history for r in queues.running.values()):
            self._early += self._emit_in_flight()  # the next draw depends on the tokens under way
        return EngineView(
            now=self.clock.now(), step=self.num_steps, config=self.config, cache=self.kv_cache,
            running=queues.running, preempted=queues.returning, new=queues.new,
            explains=self.decisions is not None,
        )  # fmt: skip

    def plan(self, view: EngineView) -> SchedulePlan:
        """Ask the policy; raises PolicyError when it raises, takes too long, or returns no SchedulePlan."""
        return self._policy.schedule(view)

    def commit(self, plan: SchedulePlan, view: EngineView) -> Batch:
        """Carry the plan out on the books, or raise PlanError and change nothing."""
        plan, batch = self._policy.committed(plan, view, self.kv_cache, self.queues.live)
        if self.decisions is not None:
            self.decisions.add(view.step, view.now, plan)
        self.queues.carry_out(batch, view.now)
        batch.started, batch.committed, batch.wake_at = view.now, self.clock.now(), plan.wake_at
        return batch

    def execute(self, batch: Batch) -> Pending:
        """Hand the batch to the executor."""
        if not batch.rows and not batch.swap_out:
            return StepResult(token_ids=())
        return self._or_fail(lambda: self.executor.execute(batch))

    def update(self, batch: Batch, result: Pending) -> list[TokenOutput]:
        """Count the batch as computed, emit the tokens that are due, end what is done, leave a record."""
        outputs, self._early = self._early, []
        outputs += self._emit_in_flight()
        self.idle = not batch.rows and not batch.preempted
        progress = self._advance(batch)
        ahead = self.config.overlap and bool(batch.rows)
        if not ahead:
            outputs += self._emit(batch, result)
        if not self.idle:
            record = StepRecord.of(batch, self.kv_cache, self.clock.now(), self.queues)
            if ahead:
                self._in_flight = (batch, result, record)
            else:
                self.records.add_step(record)
            self._policy.tell_step(record, batch.step)
        self.num_steps += 1
        self.kv_cache.balance_when_due(self.queues.live)
        self._policy.raise_event_error()
        self._progress.after(batch, progress, self.queues, self.kv_cache, self._policy.name)
        return outputs

    # What the methods above are made of.

    def _advance(self, batch: Batch) -> bool:
        """Count a batch that was handed over as computed, and keep a place for each token that it draws.

        Returns:
            Whether any request got further than it ever was.
        """
        advance, overlap, progress = self.kv_cache.advance, self.config.overlap, False
        for request, _, num_tokens, draws, _ in batch.rows:
            if request._status is not RUNNING:  # ended since the commit
                continue
            if advance(request, num_tokens):
                progress = True
            if draws:
                request._tokens.append(UNKNOWN_TOKEN)
                if overlap and len(request._tokens) >= request._length_limit:
                    self._retire(request, "length")
        for request in self.queues.let_siblings_in():
            self._policy.tell("on_arrival", request, self.num_steps)
        return progress

    def _emit(self, batch: Batch, pending: Pending) -> list[TokenOutput]:
        """Wait for a batch and let its tokens out."""
        result = self._or_fail(pending.wait)
        batch.executed = now = self.clock.now()
        outputs, logprobs = [], result.logprobs
        for index, (row, token_id) in enumerate(zip(batch.rows, result.token_ids, strict=True)):
            request, start, _, draws, _ = row
            if request._finish_time is not None:  # ended since it was handed over
                continue
            if result.prompt_logprobs and index in result.prompt_logprobs:
                take_prompt_logprobs(request, start, result.prompt_logprobs[index])
            if draws:
                text, reason = take_token(request, token_id, now)
                if reason is not None:
                    self._finish(request, reason, now)
                entry = logprobs.get(index) if logprobs else None
                # half the cost of calling it
                outputs.append(tuple.__new__(TokenOutput, (request, token_id, text, reason, entry)))
        return outputs

    def _emit_in_flight(self) -> list[TokenOutput]:
        """Let the tokens of the step in flight out, if there is one, and complete its record."""
        if self._in_flight is None:
            return []
        (batch, pending, record), self._in_flight = self._in_flight, None
        outputs = self._emit(batch, pending)
        record.complete(batch.executed, self.clock.now(), {output.request.id for output in outputs})
        self.records.add_step(record)
        return outputs

    def _retire(self, request: Request, reason: str) -> None:
        """Out of the queues, its blocks given back; what remains is to emit what it has and to close its record."""
        self.kv_cache.release(request)
        request._status, request._finish_reason = Status.FINISHED, reason
        if self.queues.leave(request):
            self._policy.tell("on_finish", request, self.num_steps)

    def _finish(self, request: Request, reason: str, now: float) -> None:
        """End a request, wherever it is, once."""
        if request._tokens[-1] == UNKNOWN_TOKEN:  # of a step that will not be waited for
            request._tokens.pop()
        request._finish_time = now
        if request._status is not Status.FINISHED:
            self._retire(request, reason)
        request._finish_reason = reason
        self.queues.end(request)
        self._progress.interrupt()
        self.records.add_request(RequestRecord.of(request))

    def _or_fail(self, call: Callable[[], Answer]) -> Answer:
        """The executor's answer; when it fails the cache's contents are unknown, so every live request is ended."""
        try:
            return call()
        except BaseException:
            self._in_flight = None
            for request in self.queues.all_unfinished():
                self._finish(request, "error", self.clock.now())
            self.kv_cache.reset_prefix_cache()
            raise
