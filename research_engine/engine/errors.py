"""What can go wrong in the core, each as an exception that names the value and the rule."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the core raises on purpose."""


class RequestError(EngineError, ValueError):
    """A request that can never be served was refused when it was added; the engine goes on."""


class QueueFullError(RequestError):
    """As many requests wait as max_num_queued allows; the same request may be served later."""


class PlanError(EngineError):
    """A scheduler's plan broke a rule; nothing of it was carried out.

    Attributes:
        rule: the broken rule, as a sentence.
        step: number of the step that was planned.
        request_id: the request concerned, or None when the plan as a whole is at fault.
    """

    def __init__(self, rule: str, *, step: int | None = None, request_id: str | None = None) -> None:
        self.rule = rule
        self.step = step
        self.request_id = request_id
        where = "" if step is None else f"step {step}: "
        whom = "" if request_id is None else f"request {request_id!r}: "
        super().__init__(f"{where}{whom}{rule}")


class PolicyError(EngineError):
    """A scheduler raised an exception of its own, or returned something that is no plan; the cause is chained."""


class StalledError(EngineError):
    """Steps go by and no request advances; names the request that waits longest."""


class IntegrityError(EngineError, AssertionError):
    """The KV cache's books do not balance: a fault of the engine's own."""
