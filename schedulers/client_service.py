"""What each step gave to which client, as fair policies count it: prompts once, outputs as drawn, recompute never."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from research_engine.engine.contract import Request

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


class ClientService:
    """Follows a scheduler's three events.

    Args:
        weight_input: what a prompt token counts; a prompt is charged whole when its request first is served.
        weight_output: what an output token counts.
    """

    def __init__(self, weight_input: float, weight_output: float) -> None:
        self._weight_input = weight_input
        self._weight_output = weight_output
        self._client: dict[str, str] = {}
        self._unpaid: dict[str, float] = {}  # price of the prompts not yet charged
        self._ended: list[str] = []

    def arrive(self, request: Request) -> None:
        if request.id in self._ended:  # the id lives again
            self._ended.remove(request.id)
        self._client[request.id] = request.client
        self._unpaid[request.id] = self._weight_input * request.num_prompt_tokens

    def price(self, request: Request) -> float:
        """What will be charged for its prompt at its admission; 0 once that was done."""
        return self._unpaid.get(request.id, 0.0)

    def finish(self, request: Request) -> None:
        self._ended.append(request.id)  # the step in which it ended is still to be charged

    def settle(self, record: StepRecord) -> dict[str, float]:
        """Client -> service of the step."""
        service: defaultdict[str, float] = defaultdict(float)
        weight = self._weight_output
        for name, drew in zip(record.request_ids, record.drew, strict=True):
            client = self._client.get(name)
            if client is None:  # aborted before the step was done
                continue
            if drew:
                service[client] += weight
            if name in self._unpaid:
                service[client] += self._unpaid.pop(name)
        for name in self._ended:
            self._client.pop(name, None)
            self._unpaid.pop(name, None)
        self._ended.clear()
        return service
