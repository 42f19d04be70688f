"""The middle row of Sarathi-Serve's Table 4: prompts in chunks, and no step that holds a chunk and decodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from research_engine.engine.contract import EngineView, Request
from schedulers.base import PolicyScheduler

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


@dataclass(kw_only=True)
class ChunksOnly(PolicyScheduler):
    """A step of decodes follows each step of prompt chunks, so that no answer stalls for longer than one chunk.

    Waiting bound: nobody who arrives later is admitted before a request.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decodes_next = False

    def order(self, view: EngineView) -> Iterable[Request]:
        decodes = [request for request in view.running if request.is_decoding]
        if not (self._decodes_next and decodes):
            yield from (request for request in view.running if not request.is_decoding)
            yield from self.newcomers(view)
        if not self.planned:
            yield from decodes

    def on_step(self, record: StepRecord) -> None:
        self._decodes_next = any(count > 1 for count in record.num_tokens)
