"""What a cost model is asked, and the features of a batch that every model prices."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from research_engine.engine.contract import Batch
from research_engine.engine.records import StepRecord


class StepTime(NamedTuple):
    """Where a step's time goes, in seconds.

    Attributes:
        before: the host, scheduling and preparing inputs; the device has nothing of the step yet.
        launch: the host, handing kernels over one by one while the device already works on the first.
        device: the device, if kernels are there as soon as it wants them.
        after: the host, from the moment the tokens are out until it can look at the next step.
        rate: tokens that the device takes a second in this step, padding included.
        slope: share by which the device takes longer at twice the threshold of its power limit (power.py).
    """

    before: float
    launch: float
    device: float
    after: float
    rate: float = 0.0
    slope: float = 0.0

    @property
    def total(self) -> float:
        """Of a step that runs alone, on a rested device."""
        return self.before + max(self.launch, self.device) + self.after


@runtime_checkable
class CostModel(Protocol):
    """Prices a step from its batch alone: no clock, no state of the engine beside what the batch says.

    A model may also have `step_time(batch)`, a StepTime: an engine that runs ahead hides the host's part of it behind
    the device's, or the other way round. Without it, all of the time is the device's. Such a model may have a
    `power_limit` (a power.PowerLimit, or None), by which steps take the device longer when it has been busy.
    """

    def seconds(self, batch: Batch) -> float:
        """Seconds from the start of a step until the next can start, when it runs alone; finite and >= 0."""
        ...


class Work(NamedTuple):
    """What a batch asks of the device. A row of one token counts as a decode: kernels treat it as one.

    Attributes:
        tokens: of all rows.
        sequences: rows.
        draws: rows whose logits are computed.
        decodes: rows of one token.
        decode_kv: tokens of context that those rows read, summed, the new token included.
        decode_kv_max: the longest of those contexts.
        prefills: (tokens, tokens computed before) of every other row.
        blocks_moved: KV blocks swapped in or out.
        blocks_copied: KV blocks copied on the device.
    """

    tokens: int
    sequences: int
    draws: int
    decodes: int = 0
    decode_kv: int = 0
    decode_kv_max: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    blocks_moved: int = 0
    blocks_copied: int = 0


def work_of(batch: Batch) -> Work:
    """The features of a batch."""
    decodes = decode_kv = longest = draws = 0
    prefills = []
    for _, start, num_tokens, row_draws, _ in batch.rows:
        if row_draws:
            draws += 1
        if num_tokens == 1:
            decodes += 1
            decode_kv += start
            if start > longest:
                longest = start
        else:
            prefills.append((num_tokens, start))
    if decodes:
        decode_kv, longest = decode_kv + decodes, longest + 1
    moved = len(batch.swap_in) + len(batch.swap_out)
    return Work(batch.num_tokens, len(batch.rows), draws, decodes, decode_kv, longest, tuple(prefills), moved,
                len(batch.copies))  # fmt: skip


def work_of_record(record: StepRecord) -> Work:
    """The features of a batch, from what its step left behind."""
    decode = [start + 1 for start, tokens in zip(record.starts, record.num_tokens, strict=True) if tokens == 1]
    rows = zip(record.num_tokens, record.starts, strict=True)
    return Work(
        tokens=sum(record.num_tokens),
        sequences=len(record.num_tokens),
        draws=sum(map(bool, record.drew)),
        decodes=len(decode),
        decode_kv=sum(decode),
        decode_kv_max=max(decode, default=0),
        prefills=tuple((tokens, start) for tokens, start in rows if tokens > 1),
        blocks_moved=record.blocks_swapped_in + record.blocks_swapped_out,
        blocks_copied=record.blocks_copied,
    )


def single_prefill(prefills: tuple[tuple[int, int], ...]) -> tuple[int, float]:
    """The one chunk (tokens, tokens computed before) with as many tokens and query-key pairs as `prefills` together.

    A chunk of c tokens after k computed ones has c (k + (c + 1) / 2) causal pairs. Several short prompts have fewer
    pairs than one prompt of their summed length, and then the second number is negative; the first is 0 for none.
    """
    chunk = pairs = 0.0
    for tokens, before in prefills:
        chunk += tokens
        pairs += tokens * (before + (tokens + 1) / 2)
    return (int(chunk), pairs / chunk - (chunk + 1) / 2) if chunk else (0, 0.0)


def longest_prefill(prefills: tuple[tuple[int, int], ...]) -> int:
    """Tokens of the longest context of `prefills`, its own chunk included; 0 for none."""
    return max((tokens + before for tokens, before in prefills), default=0)
