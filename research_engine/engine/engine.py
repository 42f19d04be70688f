"""The loop: view, schedule, commit, execute, update. Owns the requests and what may happen to them; chooses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .clock import MonotonicClock
from .config import EngineConfig
from .contract import Batch, Clock, EngineView, Executor, SchedulePlan, Scheduler, StepResult, TokenLogprobs
from .decision_log import DecisionLog
from .errors import PolicyError, QueueFullError, RequestError, StalledError
from .kv_cache import KVCache
from .records import Records, RequestRecord, StepRecord
from .request import RUNNING, Request, Status
from .request_rules import check_request
from .sampling_params import SamplingParams
from .structured import TokenConstraint
from .text import DecodeStream, TextAssembler

_BLOCKS_CHECKED_PER_STEP = 16
"""Balancing the books reads every block. An idle engine does so only once its steps have earned it at this rate, or a
server of many short requests would do little else."""


class TokenOutput(NamedTuple):
    """One token that came out of a step.

    `text` is what may be shown now; a token that a stop string took back, or an end token, brings none.
    """

    request: Request
    token_id: int
    text: str
    finish_reason: str | None
    logprobs: TokenLogprobs | None


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
        self.scheduler = scheduler
        self.executor = executor
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.records = Records() if records is None else records
        self.decisions = decisions
        if decisions is not None:
            decisions.policy = type(scheduler).__name__
        self.kv_cache = KVCache(config)
        self.num_steps = 0
        self.idle = True  # the last plan held nothing
        self._decode_stream = decode_stream
        self._constrain = constrain
        self._eos = frozenset(config.eos_token_ids)
        self._live: dict[str, Request] = {}  # all that a scheduler sees
        self._running: dict[str, Request] = {}  # in order of admission
        self._returning: dict[str, Request] = {}  # preempted, or a continuation whose sibling is under way
        self._new: dict[str, Request] = {}  # in order of arrival
        self._held_back: dict[str, list[Request]] = {}  # continuations that wait for their sibling's prompt
        self._names: set[str] = set()  # ids of all live requests, held back ones included
        self._groups: dict[str, list[Request]] = {}  # id as given -> its continuations not yet ended
        self._num_added = 0
        self._steps_without_progress = 0
        self._steps_unchecked = 0  # since the books were last balanced
        self._event_error: PolicyError | None = None  # of a policy's event; raised once the books are consistent

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
    ) -> list[Request]:
        """Queue a prompt; with n > 1 it becomes n requests `id/0`, `id/1` ... that share the prompt's blocks.

        Args:
            arrival_time: scheduled arrival in clock seconds; now when None.

        Returns:
            The continuations, n of them.

        Raises:
            RequestError: it could never be served; says which value breaks which limit. Nothing was queued.
            QueueFullError: max_num_queued requests wait already. Nothing was queued.
        """
        max_tokens = check_request(request_id, prompt_token_ids, sampling, self.config)
        names = [request_id] if sampling.n == 1 else [f"{request_id}/{index}" for index in range(sampling.n)]
        if request_id in self._groups or not self._names.isdisjoint(names):
            raise RequestError(f"request {request_id!r}: one of that id is live; ids are unique among live requests")
        self._check_queue(request_id)
        now = self.clock.now() if arrival_time is None else arrival_time
        seed = sampling.seed if sampling.seed is not None else (self.config.seed << 32) + self._num_added
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        group: list[Request] = []
        for index, name in enumerate(names):
            own = sampling if sampling.n == 1 else sampling.for_continuation(index, seed)
            request = Request(
                name,
                prompt_token_ids,
                own,
                arrival_time=now,
                max_tokens=max_tokens,
                seed=seed + index,
                stop_token_ids=stop_ids,
                priority=priority,
                client=client,
                deadline=deadline,
                predicted_tokens=predicted_tokens,
                group_id=request_id,
                sibling=group[0] if group else None,
                text=self._text_of(own),
                constraint=self._constraint_of(own),
                index=self._num_added,
            )
            self._num_added += 1
            group.append(request)
        self._groups[request_id] = list(group)
        self._names.update(names)
        first = group[0]
        late = bool(self._new) and now < next(reversed(self._new.values())).arrival_time
        self._live[first.id] = self._new[first.id] = first
        if late:
            self._new = dict(sorted(self._new.items(), key=lambda item: item[1].arrival_time))
        if len(group) > 1:
            self._held_back[first.id] = group[1:]
        self._tell("on_arrival", first)
        self._raise_event_error()
        return group

    def abort(self, request_id: str) -> bool:
        """End a request, or all continuations of one, wherever they are; says whether any was still live."""
        group = list(self._groups.get(request_id, ()))
        for request in group:
            self._finish(request, "abort", self.clock.now())
        self._raise_event_error()
        return bool(group)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def num_unfinished(self) -> int:
        """Requests not yet ended, continuations counted one by one."""
        return sum(map(len, self._groups.values()))

    # The loop.

    def step(self) -> list[TokenOutput]:
        """One iteration. Returns the tokens that came out, in batch order."""
        view = self.view()
        plan = self.plan(view)
        batch = self.commit(plan, view)
        result = self.execute(batch)
        return self.update(batch, result)

    def view(self) -> EngineView:
        return EngineView(
            now=self.clock.now(),
            step=self.num_steps,
            config=self.config,
            cache=self.kv_cache,
            running=self._running,
            preempted=self._returning,
            new=self._new,
        )

    def plan(self, view: EngineView) -> SchedulePlan:
        """Ask the policy.

        Raises:
            PolicyError: it raised, or returned something else than a SchedulePlan.
        """
        name = type(self.scheduler).__name__
        try:
            plan = self.scheduler.schedule(view)
        except (Exception, SystemExit) as error:
            raise PolicyError(f"step {view.step}: {name}.schedule raised {type(error).__name__}: {error}") from error
        if not isinstance(plan, SchedulePlan):
            raise PolicyError(f"step {view.step}: {name}.schedule returned {plan!r}; it must return a SchedulePlan")
        return plan

    def commit(self, plan: SchedulePlan, view: EngineView) -> Batch:
        """Carry the plan out on the books, or raise PlanError and change nothing."""
        batch = self.kv_cache.commit(plan, self._live, view.step)
        if self.decisions is not None:
            self.decisions.add(view.step, view.now, plan)
        for gone in batch.preempted:
            self._returning[gone.request_id] = self._running.pop(gone.request_id)
        for request in batch.admitted:
            (self._new if request.id in self._new else self._returning).pop(request.id)
            self._running[request.id] = request
            request._admitted_time = view.now
            if request._first_scheduled_time is None:
                request._first_scheduled_time = view.now
        batch.started = view.now
        batch.committed = self.clock.now()
        return batch

    def execute(self, batch: Batch) -> StepResult:
        """Run the executor; when it fails the cache's contents are unknown, so every live request is ended."""
        if not batch.rows and not batch.swap_out:
            return StepResult(token_ids=())
        try:
            return self.executor.execute(batch)
        except BaseException:
            for request in [r for group in self._groups.values() for r in group]:
                self._finish(request, "error", self.clock.now())
            self.kv_cache.reset_prefix_cache()
            raise

    def update(self, batch: Batch, result: StepResult) -> list[TokenOutput]:
        """Append tokens, end what is done, free blocks, leave a record."""
        executed = self.clock.now()
        advance, append = self.kv_cache.advance, self._append
        logprobs, outputs, progress = result.logprobs, [], False
        for index, (row, token_id) in enumerate(zip(batch.rows, result.token_ids, strict=True)):
            request, start, num_tokens, draws, _ = row
            if request._status is not RUNNING:  # aborted since the commit
                continue
            advance(request, num_tokens)
            end = start + num_tokens
            peak = request._peak_computed
            if end > peak:
                if peak > start:
                    request._recomputed += peak - start
                request._peak_computed = end
                progress = True
            else:
                request._recomputed += num_tokens
            if result.prompt_logprobs and index in result.prompt_logprobs:
                known = max(0, len(request._prompt_logprobs) - start)  # from before a preemption
                request._prompt_logprobs.extend(result.prompt_logprobs[index][known:])
            if draws:
                outputs.append(append(request, token_id, executed, logprobs.get(index) if logprobs else None))
        if self._held_back:
            self._let_siblings_in()
        self._leave_record(batch, executed)
        self._raise_event_error()
        self._guard_progress(progress, batch)
        return outputs

    # What the methods above are made of.

    def _check_queue(self, request_id: str) -> None:
        limit, queued = self.config.max_num_queued, len(self._returning) + len(self._new)
        if limit and queued >= limit:
            rule = f"the queue is full: {queued} requests wait, max_num_queued = {limit}"
            raise QueueFullError(f"request {request_id!r}: {rule}; add it again once some of them run")

    def _text_of(self, sampling: SamplingParams) -> TextAssembler | None:
        if self._decode_stream is None or not sampling.detokenize:
            if sampling.stop:
                raise RequestError(f"stop = {sampling.stop!r} needs a tokenizer, and this engine has none")
            return None
        return TextAssembler(
            self._decode_stream(sampling),
            sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def _constraint_of(self, sampling: SamplingParams) -> TokenConstraint | None:
        if sampling.structured_outputs is None:
            return None
        if self._constrain is None:
            raise RequestError("structured_outputs needs a tokenizer, and this engine has none")
        try:
            return self._constrain(sampling)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _append(self, request: Request, token_id: int, now: float, logprobs: TokenLogprobs | None) -> TokenOutput:
        """One drawn token: its text, and whether it ends the request."""
        tokens, text, reason, delta = request._tokens, request._text, None, ""
        tokens.append(token_id)
        if request._first_token_time is None:
            request._first_token_time = now
        request._last_token_time = now
        if token_id in request._stop_ids and len(tokens) - request._num_prompt >= request.sampling.min_tokens:
            reason = "stop"
        if text is not None:
            if reason is None or request.sampling.include_stop_str_in_output:
                delta = text.push(token_id)
            if text.stopped_by is not None:
                reason = "stop"
        if reason is None and request.constraint is not None:
            request.constraint.advance(token_id)
            reason = request.constraint.ended
        if reason is None and len(tokens) >= request._length_limit:
            reason = "length"
        if reason is not None:
            if text is not None:
                delta += text.finish()
                if text.stopped_by is not None:  # the tail completed a stop string
                    reason = "stop"
            self._finish(request, reason, now)
        return tuple.__new__(TokenOutput, (request, token_id, delta, reason, logprobs))  # half the cost of calling it

    def _finish(self, request: Request, reason: str, now: float) -> None:
        """Take a request out, wherever it is, and give its blocks back, once."""
        name = request.id
        self.kv_cache.release(request)
        request._status, request._finish_reason, request._finish_time = Status.FINISHED, reason, now
        self._names.remove(name)
        group = self._groups[request.group_id]
        group.remove(request)
        if not group:
            del self._groups[request.group_id]
        seen = self._live.pop(name, None) is not None
        for place in (self._running, self._returning, self._new):
            place.pop(name, None)
        if not seen:  # its sibling's prompt was not computed yet, so no scheduler has heard of it
            assert request.sibling is not None
            held_back = self._held_back[request.sibling.id]
            held_back.remove(request)
            if not held_back:
                del self._held_back[request.sibling.id]
        self.records.add_request(RequestRecord.of(request))
        if seen:
            self._tell("on_finish", request)

    def _let_siblings_in(self) -> None:
        """Show continuations to the scheduler once their sibling's prompt is computed, or never will be."""
        for name in list(self._held_back):
            sibling = self._live.get(name)
            if sibling is not None and sibling._computed < sibling._num_prompt:
                continue
            for request in self._held_back.pop(name):
                self._live[request.id] = self._returning[request.id] = request
                self._tell("on_arrival", request)

    def _tell(self, event: str, about: Request | StepRecord) -> None:
        """Call one of the policy's events; what it raises waits until the engine has done what it was about."""
        try:
            getattr(self.scheduler, event)(about)
        except (Exception, SystemExit) as error:
            where = f"step {self.num_steps}: {type(self.scheduler).__name__}.{event}"
            self._event_error = self._event_error or PolicyError(f"{where} raised {type(error).__name__}: {error}")
            self._event_error.__cause__ = self._event_error.__cause__ or error

    def _raise_event_error(self) -> None:
        error, self._event_error = self._event_error, None
        if error is not None:
            raise error

    def _leave_record(self, batch: Batch, executed: float) -> None:
        self.idle = not batch.rows and not batch.preempted
        self.num_steps += 1
        if not self.idle:
            waiting = len(self._returning) + len(self._new)
            record = StepRecord.of(batch, self.kv_cache, executed, self.clock.now(), len(self._running), waiting)
            self.records.add_step(record)
            self._tell("on_step", record)
        self._steps_unchecked += 1
        due = not self._live and self._steps_unchecked * _BLOCKS_CHECKED_PER_STEP >= self.config.num_blocks
        if self.config.check_integrity or due:
            self._steps_unchecked = 0
            self.kv_cache.check_integrity(self._live.values())

    def _guard_progress(self, progress: bool, batch: Batch) -> None:
        """End a livelock: live requests, and none gets further than it ever was.

        A step that recomputes and preempts nobody isn't counted: it gets there in the end, however long the prompt.
        """
        if progress or not self._live:
            self._steps_without_progress = 0
        elif batch.preempted or not batch.rows:
            self._steps_without_progress += 1
        if self._steps_without_progress >= self.config.stall_limit:
            longest = min(self._live.values(), key=lambda r: r.arrival_time)
            raise StalledError(
                f"no request advanced in {self._steps_without_progress} steps (stall_limit); the longest waiting is "
                f"{longest!r}, arrived at {longest.arrival_time:.3f} s; {self.kv_cache.num_free_blocks} of "
                f"{self.config.num_blocks} blocks are free; the policy is {type(self.scheduler).__name__}"
            )
