"""Computes nothing: asks a cost model how long each batch takes and lets that time pass on a virtual clock.

The engine, the scheduler and the KV cache above it are the ones that serve a GPU. No wall clock is read anywhere, so a
slow host changes no result. A step's host time passes when it is handed over and after its tokens are out, its device
time when it is waited for, so an engine that runs ahead hides the one behind the other here as it does there:

    host     before 1 | launch 1 |                before 2 | launch 2 | wait 1 | after 1 | before 3 | ...
    device            | 1 ........................................... | 2 ...............
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from research_engine.engine.contract import Batch, Request, StepResult
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.cost_model import CostModel, StepTime
from research_engine.simulation.power import PowerState


class SimulatedStep:
    """A step on its way: `wait` lets time pass until it is done.

    Attributes:
        ready: clock seconds at which its result is there.
    """

    __slots__ = ("_after", "_clock", "_result", "ready")

    def __init__(self, result: StepResult, ready: float, after: float, clock: VirtualClock) -> None:
        self._result, self.ready, self._after, self._clock = result, ready, after, clock

    def wait(self) -> StepResult:
        self._clock.reach(self.ready)
        self._clock.advance_after_reading(self._after)
        return self._result


class SimulatedExecutor:
    """An `engine.contract.Executor` in virtual time. Give its engine the same clock.

    Every drawn token is the same one, the smallest id that stops no request, so a request runs until its max_tokens:
    a simulation is told output lengths, it cannot know them.

    Args:
        cost_model: prices the batches.
        clock: is moved by every batch.
    """

    def __init__(self, cost_model: CostModel, clock: VirtualClock) -> None:
        self._cost_model: CostModel | None = cost_model
        self._step_time = getattr(cost_model, "step_time", None)
        limit = getattr(cost_model, "power_limit", None)
        self._power = None if limit is None else PowerState(limit)
        self._clock = clock
        self._free_at = -math.inf  # when the device has done what it was given
        self._token = 0
        self._stopping: set[int] = set()

    def execute(self, batch: Batch) -> SimulatedStep:
        """Let the batch's host time pass, and say when its result will be there. Changes no request.

        Raises:
            ValueError: a request asks for what only computing can tell (log-probabilities), or the cost model's answer
                is no time.
            RuntimeError: the executor was shut down.
        """
        if self._cost_model is None:
            raise RuntimeError("the executor was shut down")
        if batch.admitted:
            self._check(batch.admitted)
        if self._step_time is not None:
            time: StepTime = self._step_time(batch)
        else:
            time = StepTime(0.0, 0.0, self._cost_model.seconds(batch), 0.0)
        if not (min(time) >= 0.0 and sum(time) < math.inf):
            seconds = time.device if self._step_time is None else tuple(time)
            raise ValueError(f"step {batch.step}: the cost model says {seconds!r} s; time must be finite and >= 0")
        clock = self._clock
        clock.advance(time.before)
        launching = clock.now()
        launched = launching + time.launch
        begin = max(self._free_at, launching)
        device = time.device if self._power is None else self._power.seconds(time, begin)
        self._free_at = max(launched, begin + device)
        clock.reach(launched)
        token = self._token
        result = StepResult([token if draws else -1 for _, _, _, draws, _ in batch.rows])
        return SimulatedStep(result, self._free_at, time.after, clock)

    def shutdown(self) -> None:
        """Let the cost model go; further calls of execute raise RuntimeError."""
        self._cost_model = None

    def _check(self, admitted: Iterable[Request]) -> None:
        """Refuse what cannot be simulated, and choose a token that stops none of these requests."""
        for request in admitted:
            for name in ("logprobs", "prompt_logprobs"):
                value = getattr(request.sampling, name)
                if value is not None:
                    raise ValueError(f"request {request.id!r}: {name} = {value}; a simulation computes no logits")
            self._stopping |= request.stop_token_ids
        while self._token in self._stopping:
            self._token += 1
