"""What can go wrong in the core, each as an exception that names the value and the rule."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the core raises on purpose."""


class RequestError(EngineError, ValueError):
    """A request that can never be served was refused when it was added; the engine goes on."""


class PromptTooLongError(RequestError):
    """The prompt alone is as long as max_model_len or longer."""


class QueueFullError(RequestError):
    """As many requests wait as max_num_queued allows; the same request may be served later."""


class PolicyFault(EngineError):
    """A scheduler did what a scheduler may not do. See the two kinds below.

    Attributes:
        rule: what was wrong and what is right, as a sentence.
        step: number of the step.
        request_id: the request concerned, or None when none is at fault more than others.
        policy: class of the scheduler.
    """

    def __init__(
        self, rule: str, *, step: int | None = None, request_id: str | None = None, policy: str | None = None
    ) -> None:
        super().__init__(rule)
        self.rule = rule
        self.step = step
        self.request_id = request_id
        self.policy = policy

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        named = self.policy is None or self.rule.startswith(f"{self.policy}.")
        who = "" if named else f"{self.policy}: "
        whom = "" if self.request_id is None else f"request {self.request_id!r}: "
        return f"{where}{who}{whom}{self.rule}"


class PlanError(PolicyFault):
    """A scheduler's plan broke a rule; nothing of it was carried out."""


class PolicyError(PolicyFault):
    """A scheduler raised an exception of its own (chained), took too long, or returned something that is no plan."""


class StalledError(EngineError):
    """Steps go by and no request advances; names the request that waits longest."""


class IntegrityError(EngineError, AssertionError):
    """The KV cache's books do not balance: a fault of the engine's own."""
