"""Computes nothing: asks a cost model how long each batch takes and moves a virtual clock by that.

The engine, the scheduler and the KV cache above it are the ones that serve a GPU. No wall clock is read anywhere, so a
slow host changes no result.
"""

from __future__ import annotations

from collections.abc import Iterable

from research_engine.engine.contract import Batch, Request, StepResult
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.cost_model import CostModel


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
        self._clock = clock
        self._token = 0
        self._stopping: set[int] = set()

    def execute(self, batch: Batch) -> StepResult:
        """Let the batch's time pass. Changes no request.

        Raises:
            ValueError: a request asks for what only computing can tell (log-probabilities), or the cost model's answer
                is no time.
            RuntimeError: the executor was shut down.
        """
        if self._cost_model is None:
            raise RuntimeError("the executor was shut down")
        if batch.admitted:
            self._check(batch.admitted)
        self._clock.advance(self._cost_model.seconds(batch))
        token = self._token
        return StepResult([token if draws else -1 for _, _, _, draws, _ in batch.rows])

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
