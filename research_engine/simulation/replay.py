"""Step times of a recorded run, so that a run in virtual time makes the decisions that the real one made."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from research_engine.engine.contract import Batch
from research_engine.engine.driver import ReplayReport
from research_engine.engine.records import StepRecord

from .clock import VirtualClock


class ReplayMismatch(ValueError):
    """The run being replayed decided otherwise than the recorded one; names the step and both decisions."""


class RecordedClock(VirtualClock):
    """Virtual time that wakes when the recorded run woke: a real sleep ends a little after the time asked for.

    Args:
        start: the recorded replay's start.
        wakes: moments at which the recorded run took requests in.
    """

    def __init__(self, start: float, wakes: Sequence[float]) -> None:
        super().__init__(start)
        self._wakes = sorted(wakes)

    def sleep_until(self, when: float) -> None:
        at = bisect_left(self._wakes, when)
        super().sleep_until(self._wakes[at] if at < len(self._wakes) else when)


class ReplayCost:
    """A CostModel that ends step k of a run when step k of the recorded run ended.

    A request that the real run took in between two steps is taken in there again: its entry, not the end of the step
    before it, is when the step counts as ended. Batches are compared with the recorded ones.

    Args:
        steps: of the recorded run; with other decisions the recorded times would mean nothing.
        report: of its replay.
    """

    def __init__(self, steps: Sequence[StepRecord], report: ReplayReport) -> None:
        self._steps = [step for step in steps if step.request_ids or step.blocks_swapped_out]
        self._ends = self._step_ends(self._steps, report)
        self._at = 0

    @classmethod
    def of(cls, steps: Sequence[StepRecord], report: ReplayReport) -> tuple[ReplayCost, RecordedClock]:
        """The cost model and the clock that replay a run."""
        return cls(steps, report), RecordedClock(report.start, list(report.entered.values()))

    def seconds(self, batch: Batch) -> float:
        """Raises ReplayMismatch when the batch is not the recorded one, or the record has no more steps."""
        if self._at == len(self._steps):
            raise ReplayMismatch(f"step {batch.step}: the recorded run had ended after {len(self._steps)} steps")
        record, end = self._steps[self._at], self._ends[self._at]
        own = [(row.request.id, row.start, row.num_tokens) for row in batch.rows]
        recorded = list(zip(record.request_ids, record.starts, record.num_tokens, strict=True))
        if own != recorded:
            what = "(request, computed, tokens)"
            raise ReplayMismatch(f"step {batch.step}: the batch is {own}, the recorded one was {recorded} {what}")
        self._at += 1
        seconds = max(0.0, end - batch.started)
        while batch.started + seconds < end:  # a rounded difference may fall short of the moment by its last bit
            seconds = math.nextafter(seconds, math.inf)
        return seconds

    @staticmethod
    def _step_ends(steps: Sequence[StepRecord], report: ReplayReport) -> list[float]:
        """When each step counts as ended: at the last entry before the next step, or with its own end.

        Where nothing was live, what followed was a sleep, which the clock replays; unless a request was due by then.
        It entered without a sleep, perhaps together with one that came between the step's end and that moment.
        """
        earliest: dict[float, float] = {}  # of an entry: when the first of those that entered at once was due
        for name, entry in report.entered.items():
            earliest[entry] = min(earliest.get(entry, math.inf), report.due[name])
        entries, ends = sorted(earliest), []
        following = [*(step.started for step in steps[1:]), math.inf]
        for step, next_start in zip(steps, following, strict=True):
            first, last = bisect_right(entries, step.finished), bisect_right(entries, next_start)
            if last == first or next_start == math.inf:
                ends.append(step.finished)
            elif _gap_is_idle(step):
                ends.append(entries[first] if earliest[entries[first]] <= step.finished else step.finished)
            else:
                ends.append(entries[last - 1])
        return ends


def _gap_is_idle(step: StepRecord) -> bool:
    """Nothing was live after the step."""
    return step.num_running == 0 and step.num_waiting == 0
