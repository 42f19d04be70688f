"""Skip-join multi-level feedback queue: short answers first without knowing which are short.

Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe), 2023, section 4.1, with service
counted in tokens rather than seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from research_engine.engine.contract import EngineView, Fact, Request

from .kept_queue import Rank
from .ranked import RankedScheduler

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


@dataclass
class _Job:
    request: Request
    level: int
    turn: int  # position within the level, in order of joining it
    left: float  # tokens of its quantum
    computed: int = 0  # most tokens ever computed; recompute is no service
    served: float = 0.0  # when it last was, or arrived, or was promoted


@dataclass(kw_only=True)
class MLFQ(RankedScheduler):
    """The highest level first, in a level by order of joining, whoever runs.

    Level i has a quantum of `quantum` x `growth`^i tokens. A request joins at the first level whose quantum holds its
    prompt, and goes one down when its quantum is used up (at the last level: to that level's end). Waiting bound: after
    `starvation` seconds without service a request joins the end of the top level; it is served once those that
    stand there have used their quanta up, at most `quantum` tokens each beyond one prompt that fits it.

    Args:
        levels: number of queues.
        quantum: tokens at the top level.
        growth: ratio of the quanta of neighbouring levels.
        starvation: seconds without service after which a request is promoted; inf never does, and ends the bound.
    """

    levels: int = 6
    quantum: int = 64
    growth: float = 2.0
    starvation: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("levels", "quantum"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int) and value >= 1, "an integer >= 1")
        self._check("growth", self.growth >= 1, ">= 1")
        self._check("starvation", self.starvation > 0, "seconds > 0 (inf: no promotion)")
        self._jobs: OrderedDict[str, _Job] = OrderedDict()  # served longest ago first
        self._turn = 0

    def rank(self, request: Request) -> Rank:
        job = self._jobs[request.id]
        return (job.level, job.turn)

    def order(self, view: EngineView) -> Iterable[Request]:
        while self._jobs:
            job = next(iter(self._jobs.values()))
            if view.now - job.served <= self.starvation:
                break
            job.served = view.now
            self._jobs.move_to_end(job.request.id)
            if job.level > 0:
                self._join(job, 0)
        return super().order(view)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        job = self._jobs[request.id]
        return {"level": job.level, "turn": job.turn, "quantum left": job.left, "last served": job.served}

    def on_arrival(self, request: Request) -> None:
        level = 0
        while level < self.levels - 1 and self.quantum * self.growth**level < request.num_tokens:
            level += 1
        job = self._jobs[request.id] = _Job(request, level, 0, 0.0, served=request.arrival_time)
        self._join(job, level)
        super().on_arrival(request)

    def on_step(self, record: StepRecord) -> None:
        jobs = self._jobs
        for name, start, num_tokens in zip(record.request_ids, record.starts, record.num_tokens, strict=True):
            job = jobs.get(name)
            if job is None:  # it has ended
                continue
            job.served = record.executed
            jobs.move_to_end(name)
            end = start + num_tokens
            if end > job.computed:
                job.left -= end - job.computed
                job.computed = end
                if job.left <= 0:
                    self._join(job, min(job.level + 1, self.levels - 1))
        super().on_step(record)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        del self._jobs[request.id]

    def _join(self, job: _Job, level: int) -> None:
        self._turn += 1
        job.level, job.turn, job.left = level, self._turn, self.quantum * self.growth**level
        self.queue.reorder(job.request)
