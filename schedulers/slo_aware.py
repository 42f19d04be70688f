"""Least slack first: whose next token is due soonest by its reader's pace.

Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services", 2024. A reader
expects token i (from 0) of a request at

    due(i) = arrival + ttft + i x tpot,    QoE = 1 - S_delay / S_whole

where S_whole is the area under the expected curve of tokens over time and S_delay the area between it and the curve of
the tokens that were there to be read. A token that comes early waits in the reader's buffer and gains nothing, so QoE
is 1 while no token comes after its due time. Andes packs a batch by gain of QoE per KV token over a horizon; this
policy serves by slack(r) = due(tokens of r so far) - now, which keeps S_delay at 0 wherever that can be done, and lets
those far ahead of their readers give way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .kept_queue import Rank
from .ranked import RankedScheduler


@dataclass(kw_only=True)
class SLOAware(RankedScheduler):
    """The least slack first, whoever runs; `now` is the same for all, so the due time is the rank.

    A waiting request takes the place of a running one only if that is due at least `lead` seconds later. Waiting bound:
    a request without a token ranks by arrival + ttft, so nobody who arrives after it goes before it; preempted with i
    tokens, nobody who arrives more than i x tpot seconds after it.

    Args:
        ttft: seconds from arrival to the first token that a reader accepts.
        tpot: seconds per token at which a reader reads.
        lead: seconds that a running request must be ahead of a waiting one to lose its place to it.
    """

    ttft: float = 1.0
    tpot: float = 0.1
    lead: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ttft", "tpot", "lead"):
            self._check(name, getattr(self, name) >= 0, "seconds >= 0")

    def due(self, request: Request) -> float:
        """Clock seconds at which its reader wants the next token."""
        return self.rank(request)[0]

    def rank(self, request: Request) -> Rank:
        return (request.arrival_time + self.ttft + request.num_output_tokens * self.tpot, request.index)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"slack": self.due(request) - view.now, "due": self.due(request)}

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        due, index = self.rank(needy)
        if self.lead and not needy.is_running:
            due, index = due + self.lead, -1
        return self.ranked_after((due, index), candidates)
