"""Records that are folded as they come, so that memory does not grow with the tokens of a simulated day."""

from __future__ import annotations

from collections.abc import Callable

from research_engine.engine.records import Records, RequestRecord, StepRecord


class StreamedRecords(Records):
    """Keeps every request's record and of the steps the totals alone; `steps` stays empty.

    Latencies need the requests' records alone. What needs each step (gaps between tokens, KV use over time) can be had
    by taking the steps as they pass.

    Args:
        on_step: sees each step's record once, to write it away or to fold it otherwise.
        on_request: sees each request's record; they are not kept when it is given.

    Attributes:
        num_steps, num_rows, num_tokens, num_drawn: steps, batch rows, tokens computed, tokens drawn.
        num_preemptions, tokens_lost: preemptions, and computed tokens they dropped.
        busy_seconds: summed length of the steps.
        most_waiting, most_blocks_used: the largest queue and the most blocks held after a step.
    """

    def __init__(
        self,
        *,
        on_step: Callable[[StepRecord], None] | None = None,
        on_request: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_step, self._on_request = on_step, on_request
        self.num_steps = self.num_rows = self.num_tokens = self.num_drawn = 0
        self.num_preemptions = self.tokens_lost = 0
        self.busy_seconds = 0.0
        self.most_waiting = self.most_blocks_used = 0

    def add_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_rows += len(record.request_ids)
        self.num_tokens += sum(record.num_tokens)
        self.num_drawn += sum(record.drew)
        for event in record.preemptions:
            self.num_preemptions += 1
            self.tokens_lost += event.tokens_lost
        self.busy_seconds += record.finished - record.started
        self.most_waiting = max(self.most_waiting, record.num_waiting)
        self.most_blocks_used = max(self.most_blocks_used, record.blocks_used)
        if self._on_step is not None:
            self._on_step(record)

    def add_request(self, record: RequestRecord) -> None:
        if self._on_request is not None:
            self._on_request(record)
        else:
            super().add_request(record)
