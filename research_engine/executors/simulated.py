"""Computes nothing: asks a cost model how long each batch takes and lets that time pass on a virtual clock.

The engine, the scheduler and the KV cache above it are the ones that serve a GPU. No wall clock is read anywhere, so a
slow host changes no result. A step's host time passes when it is handed over, its device time when it is waited for,
so an engine that runs ahead hides the one behind the other here as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from research_engine.engine.contract import Batch, Request, StepResult
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.cost_model import CostModel


class SimulatedStep:
    """A step on its way: `wait` lets time pass until it is done.

    Attributes:
        ready: clock seconds at which its result is there.
    """

    __slots__ = ("_clock", "_result", "ready")

    def __init__(self, result: StepResult, ready: float, clock: VirtualClock) -> None:
        self._result, self.ready, self._clock = result, ready, clock

    def wait(self) -> StepResult:
        self._clock.reach(self.ready)
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
        self._host_seconds = getattr(cost_model, "host_seconds", None)
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
        seconds = self._cost_model.seconds(batch)
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"step {batch.step}: the cost model says {seconds!r} s; time must be finite and >= 0")
        host = 0.0
        if self._host_seconds is not None:
            host = min(seconds, self._host_seconds(batch))
            self._clock.advance(host)
        self._free_at = max(self._free_at, self._clock.now()) + (seconds - host)
        token = self._token
        result = StepResult([token if draws else -1 for _, _, _, draws, _ in batch.rows])
        return SimulatedStep(result, self._free_at, self._clock)

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
