"""Victim rules: of the running requests that may be asked to give way, which one does. `victim_rule` names one of them.

A rule only picks; who may be asked is the policy's affair (`PolicyScheduler.yielding`). Ties go to the last admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from research_engine.engine.contract import EngineView, Request

VictimRule = Callable[[Sequence[Request], EngineView], Request]


def predicted_outputs_left(request: Request) -> int:
    """Output tokens still to come, by the length predictor's guess, or by max_tokens where there is none; >= 1."""
    limit = request.max_num_tokens - request.num_prompt_tokens
    guess = limit if request.predicted_tokens is None else min(request.predicted_tokens, limit)
    return max(1, guess - request.num_output_tokens)


def last_admitted(candidates: Sequence[Request], view: EngineView) -> Request:
    """The youngest: it has the least service behind it, as a rule."""
    return candidates[-1]


def fewest_tokens_lost(candidates: Sequence[Request], view: EngineView) -> Request:
    """The one with the fewest computed tokens, which recompute would compute again."""
    return min(reversed(candidates), key=lambda request: request.num_computed_tokens)


def most_blocks_freed(candidates: Sequence[Request], view: EngineView) -> Request:
    """The one that alone holds the most blocks: the fewest victims, but large ones."""
    return max(reversed(candidates), key=view.blocks_freed_by)


def lowest_priority(candidates: Sequence[Request], view: EngineView) -> Request:
    """The least urgent by `request.priority`."""
    return max(reversed(candidates), key=lambda request: request.priority)


def longest_remaining(candidates: Sequence[Request], view: EngineView) -> Request:
    """The one with the most output tokens to come, by prediction: it would hold its blocks longest."""
    return max(reversed(candidates), key=predicted_outputs_left)


VICTIM_RULES: Mapping[str, VictimRule] = {
    rule.__name__: rule
    for rule in (last_admitted, fewest_tokens_lost, most_blocks_freed, lowest_priority, longest_remaining)
}
