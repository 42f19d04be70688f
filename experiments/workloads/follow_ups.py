"""Requests whose arrival depends on the system: later turns of a conversation, and the next one of a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field, field_validator

from experiments.settings import Settings
from research_engine.engine.driver import Arrival


class ConversationSettings(Settings):
    """Requests come in conversations: a turn's prompt is everything before it, and its own tokens.

    Args:
        turns: [least, most], both included, uniform.
        think_time: mean seconds from the end of an answer to the next turn, exponential.
    """

    turns: tuple[int, int] = (2, 6)
    think_time: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("turns")
    @classmethod
    def _ascending(cls, turns: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= turns[0] <= turns[1]:
            raise ValueError(f"{list(turns)} must be [least, most] with 1 <= least <= most")
        return turns


class PrefixSettings(Settings):
    """Every prompt begins with one of a few texts, such as system prompts.

    Args:
        count: texts.
        tokens: of each.
        exponent: of Zipf's law over the texts: the k-th most popular one is taken with a share of k^-exponent; 0 is
            uniform.
    """

    count: int = Field(ge=1)
    tokens: int = Field(ge=1)
    exponent: float = Field(default=0.0, ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Turn:
    """A request before it is known what it follows: `arrival` has its own tokens alone as the prompt.

    Attributes:
        think: seconds that it comes after what it waits for.
    """

    arrival: Arrival
    think: float = 0.0


@dataclass(frozen=True)
class FollowUps:
    """What comes after what.

    Attributes:
        next_turn: request id -> the turn that follows it in its conversation.
        waiting: conversations that nothing but a free place lets begin; of a closed loop.
        think_time: seconds from a free place to the next conversation's beginning.
    """

    next_turn: dict[str, Turn]
    waiting: Sequence[Arrival] = ()
    think_time: float = 0.0

    def begin(self) -> FollowUp:
        """For one replay."""
        return FollowUp(self)


class FollowUp:
    """Says what a request's end brings; holds the state of one replay. As `replay` takes it."""

    def __init__(self, plan: FollowUps) -> None:
        self._plan = plan
        self._waiting = deque(plan.waiting)

    def __call__(self, arrival: Arrival, output_token_ids: Sequence[int], time: float) -> list[Arrival]:
        """The arrivals that come of an end.

        Args:
            arrival: what ended.
            output_token_ids: of it; empty when it was refused.
            time: seconds after the replay's start.
        """
        turn = self._plan.next_turn.get(arrival.request_id)
        if turn is not None:
            prompt = [*arrival.prompt_token_ids, *output_token_ids, *turn.arrival.prompt_token_ids]
            return [replace(turn.arrival, time=time + turn.think, prompt_token_ids=prompt)]
        if self._waiting:
            return [replace(self._waiting.popleft(), time=time + self._plan.think_time)]
        return []
