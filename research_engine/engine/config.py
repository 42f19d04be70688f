"""Limits and sizes of one engine; frozen, validated on construction, passed down."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from .reservation import RESERVATIONS, Reservation

OnFault = Literal["stop", "go_on"]
FAULT_WAYS: tuple[str, ...] = get_args(OnFault)


@dataclass(frozen=True)
class EngineConfig:
    """What the core needs to know; models, devices and tokenizers are not its business.

    Args:
        num_blocks: KV blocks on the device.
        block_size: token slots per block.
        num_host_blocks: KV blocks in host memory, for preemption by swap; 0 turns swapping off.
        max_num_seqs: requests that may hold KV blocks at once.
        max_num_batched_tokens: tokens that one step may hold (its budget).
        max_model_len: prompt and output tokens of one request at most.
        max_num_queued: requests that may wait; one more is refused with QueueFullError. 0 sets no bound.
        reservation: blocks that a request holds: `paged`, `reserve_max`, `reserve_pow2`, `buddy_pow2`, ...; see
            reservation.py.
        enable_prefix_caching: keep the blocks of ended requests and reuse them for equal prefixes.
        vocab_size: token ids are below it; 0 leaves them unchecked.
        eos_token_ids: tokens that end a sequence unless ignore_eos is set.
        seed: base of the seeds of requests that bring none.
        check_integrity: balance the KV cache's books after every step, not only when idle.
        overlap: schedule and hand over a step while the one before it runs. Tokens are the same; a request that stops
            by itself is found out one step late.
        on_fault: what follows when the policy breaks a rule, raises, or takes too long: "stop" raises PlanError or
            PolicyError, nothing of its plan being done, and the step may be tried again; "go_on" plans that step by
            arrival instead (fallback.py), and keeps the error in `Engine.faults`.
        schedule_limit: real seconds that one decision of the policy may take, computing or asleep; time in which a busy
            machine let it wait for a core isn't counted.
        stall_limit: idle or preempting steps in a row, without any request advancing, before StalledError ends the run.

    Raises:
        ValueError: naming field, value and rule.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    max_num_queued: int = 0
    reservation: Reservation = "paged"
    enable_prefix_caching: bool = True
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    check_integrity: bool = False
    overlap: bool = False
    on_fault: OnFault = "stop"
    schedule_limit: float = 1.0
    stall_limit: int = 1000

    def __post_init__(self) -> None:
        if self.reservation not in RESERVATIONS:
            raise ValueError(f"reservation = {self.reservation!r}: must be one of {', '.join(RESERVATIONS)}")
        if self.on_fault not in FAULT_WAYS:
            raise ValueError(f"on_fault = {self.on_fault!r}: must be one of {', '.join(FAULT_WAYS)}")
        if not self.schedule_limit > 0:
            raise ValueError(f"schedule_limit = {self.schedule_limit!r}: must be seconds > 0 (inf: no limit)")
        least = {"num_host_blocks": 0, "vocab_size": 0, "max_num_queued": 0, "max_model_len": 2}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type != "int" or entry.name == "seed":
                continue
            low = least.get(entry.name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{entry.name} = {value!r}: must be an integer >= {low}")

    @property
    def num_slots(self) -> int:
        """Token slots on the device."""
        return self.num_blocks * self.block_size
