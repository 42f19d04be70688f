"""The rules of a plan. Whatever a policy returns is checked here before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .block_ledger import BlockLedger
from .config import EngineConfig
from .contract import Preemption, SchedulePlan
from .errors import PlanError
from .foreign import shown
from .request import Request, Status

if TYPE_CHECKING:
    from .kv_cache import KVCache


def check_plan(
    plan: SchedulePlan, requests: Mapping[str, Request], cache: KVCache, config: EngineConfig, step: int
) -> None:
    """Check every rule; changes nothing.

    Raises:
        PlanError: with the step, the request and the first rule that is broken.
    """
    if not isinstance(plan.tokens, Mapping):
        raise PlanError(f"tokens is {shown(plan.tokens)}; it must map request ids to numbers of tokens", step=step)
    if not isinstance(plan.preempt, (list, tuple)):
        raise PlanError(f"preempt is {shown(plan.preempt)}; it must be a list or tuple of Preemption", step=step)
    if not isinstance(plan.reasons, Mapping):
        raise PlanError(f"reasons is {shown(plan.reasons)}; it must map request ids to words", step=step)
    if not isinstance(plan.seen, Mapping) or not isinstance(plan.rest, str):
        rule = f"seen is {shown(plan.seen)}, rest {shown(plan.rest)}; they must be a mapping and a text"
        raise PlanError(rule, step=step)
    for name, why in plan.reasons.items():
        if not isinstance(why, str):
            raise PlanError(f"reasons[{shown(name)}] is {shown(why)}; it must be a text", step=step)
    for name, facts in plan.seen.items():
        if not isinstance(facts, Mapping) or not all(isinstance(fact, (str, int, float)) for fact in facts.values()):
            raise PlanError(f"seen[{shown(name)}] is {shown(facts)}; it must map names to numbers and texts", step=step)
    if plan.wake_at is not None and not _is_time(plan.wake_at):
        rule = f"wake_at is {shown(plan.wake_at)}; it must be a finite number of clock seconds, or None"
        raise PlanError(rule, step=step)
    ledger = BlockLedger(cache)
    if plan.preempt:
        _check_preemptions(plan, requests, cache, ledger, config, step)
    running = Status.RUNNING
    total = admitted = 0
    for name, num_tokens in plan.tokens.items():
        request = requests.get(name)
        if request is None:
            rule = "is scheduled, but no such request is live (finished, aborted, held back or never added)"
            raise PlanError(rule, step=step, request_id=name)
        if type(num_tokens) is not int or num_tokens < 1:
            rule = f"gets {shown(num_tokens)} tokens; it must be an integer >= 1 (leave the request out to skip it)"
            raise PlanError(rule, step=step, request_id=name)
        known = len(request._tokens) - request._computed
        if request._status is not running:
            admitted += 1
            known = len(request._tokens) - cache.cached_tokens(request)
        if num_tokens > known:
            rule = f"gets {num_tokens} tokens, but only {known} are known and not computed"
            raise PlanError(rule, step=step, request_id=name)
        if not ledger.grant(request, num_tokens):
            rule = (
                f"needs {ledger.cost(request, num_tokens)} more blocks for {num_tokens} tokens, "
                f"{ledger.free_blocks} are left of {config.num_blocks}"
            )
            raise PlanError(rule, step=step, request_id=name)
        total += num_tokens
    if total > config.max_num_batched_tokens:
        rule = f"it holds {total} tokens, max_num_batched_tokens is {config.max_num_batched_tokens}"
        raise PlanError(rule, step=step)
    seats = cache.num_running + admitted - len(plan.preempt)
    if seats > config.max_num_seqs:
        raise PlanError(f"{seats} requests would hold blocks, max_num_seqs is {config.max_num_seqs}", step=step)


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _check_preemptions(
    plan: SchedulePlan,
    requests: Mapping[str, Request],
    cache: KVCache,
    ledger: BlockLedger,
    config: EngineConfig,
    step: int,
) -> None:
    gone: set[str] = set()
    for preemption in plan.preempt:
        named = isinstance(preemption, Preemption) and isinstance(preemption.request_id, str)
        if not named or not isinstance(preemption.reason, str):  # the reason goes into the records
            rule = f"preempt holds {shown(preemption)}; it must hold Preemption(request_id, mode, reason), a text each"
            raise PlanError(rule, step=step)
        name, mode = preemption.request_id, preemption.mode
        request, rule = requests.get(name), ""
        if request is None:
            rule = "is preempted, but no such request is live"
        elif not request.is_running:
            rule = f"is preempted, but it is {request.status.value}, not running"
        elif name in gone:
            rule = "is preempted twice in one plan"
        elif name in plan.tokens:
            rule = "is preempted and scheduled in one plan"
        elif mode not in ("recompute", "swap"):
            rule = f"preemption mode {shown(mode)} is neither 'recompute' nor 'swap'"
        elif mode == "swap" and cache.blocks_to_swap(request) > ledger.free_host_blocks:
            rule = (
                f"swapping it needs {cache.blocks_to_swap(request)} host blocks, {ledger.free_host_blocks} are free "
                f"of num_host_blocks = {config.num_host_blocks}"
            )
        if rule:
            raise PlanError(rule, step=step, request_id=name)
        assert request is not None
        gone.add(name)
        ledger.preempt(request, mode)
