"""Who is where: every request that has not ended, in the queues that a scheduler sees and the one that it does not."""

from __future__ import annotations

from .config import EngineConfig
from .contract import Batch
from .errors import QueueFullError, RequestError
from .request import Request


class RequestQueues:
    """The engine's account of its requests. A request of which the last token is under way is in no queue any more.

    Attributes:
        live: all that a scheduler sees, by id: the union of the next three.
        running: hold device blocks, in order of admission.
        returning: preempted, or a continuation whose sibling's prompt is computed.
        new: never ran, in order of arrival.
    """

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.returning: dict[str, Request] = {}
        self.new: dict[str, Request] = {}
        self._held_back: dict[str, list[Request]] = {}  # continuations that wait for their sibling's prompt
        self._names: set[str] = set()  # ids of all that have not ended, held back ones included
        self._groups: dict[str, list[Request]] = {}  # id as given -> its continuations not yet ended

    @property
    def num_waiting(self) -> int:
        return len(self.returning) + len(self.new)

    @property
    def num_unfinished(self) -> int:
        """Requests not yet ended, continuations counted one by one."""
        return sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._groups)

    def group(self, request_id: str) -> list[Request]:
        """The continuations of one request that have not ended, by its id as given: a list of its own."""
        return list(self._groups.get(request_id, ()))

    def all_unfinished(self) -> list[Request]:
        return [request for group in self._groups.values() for request in group]

    def check(self, request_id: str, names: list[str], config: EngineConfig) -> None:
        """Raises RequestError for an id that is live, QueueFullError when max_num_queued requests wait."""
        if request_id in self._groups or not self._names.isdisjoint(names):
            raise RequestError(f"request {request_id!r}: one of that id is live; ids are unique among live requests")
        limit, queued = config.max_num_queued, self.num_waiting
        if limit and queued >= limit:
            rule = f"the queue is full: {queued} requests wait, max_num_queued = {limit}"
            raise QueueFullError(f"request {request_id!r}: {rule}; add it again once some of them run")

    def add(self, group: list[Request]) -> None:
        """The first continuation joins the new ones by arrival; the others wait until its prompt is computed."""
        first, new = group[0], self.new
        self._groups[first.group_id] = list(group)
        self._names.update(request.id for request in group)
        late = bool(new) and first.arrival_time < next(reversed(new.values())).arrival_time
        self.live[first.id] = new[first.id] = first
        if late:
            ordered = sorted(new.items(), key=lambda item: item[1].arrival_time)
            new.clear()
            new.update(ordered)
        if len(group) > 1:
            self._held_back[first.id] = group[1:]

    def carry_out(self, batch: Batch, now: float) -> None:
        """Move whom a committed batch preempted and admitted."""
        for gone in batch.preempted:
            self.returning[gone.request_id] = self.running.pop(gone.request_id)
        for request in batch.admitted:
            (self.new if request.id in self.new else self.returning).pop(request.id)
            self.running[request.id] = request
            request._admitted_time = now
            if request._first_scheduled_time is None:
                request._first_scheduled_time = now

    def let_siblings_in(self) -> list[Request]:
        """Continuations that join the queue, their sibling's prompt being computed, or never to be."""
        freed: list[Request] = []
        for name in list(self._held_back):
            sibling = self.live.get(name)
            if sibling is None or sibling.num_computed_tokens >= sibling.num_prompt_tokens:
                freed += self._held_back.pop(name)
        for request in freed:
            self.live[request.id] = self.returning[request.id] = request
        return freed

    def leave(self, request: Request) -> bool:
        """Out of every queue; says whether a scheduler had heard of it."""
        name = request.id
        seen = self.live.pop(name, None) is not None
        for place in (self.running, self.returning, self.new):
            place.pop(name, None)
        if not seen and request.sibling is not None:  # its sibling's prompt was not computed yet
            held_back = self._held_back[request.sibling.id]
            held_back.remove(request)
            if not held_back:
                del self._held_back[request.sibling.id]
        return seen

    def end(self, request: Request) -> None:
        """It has ended: its id may be used again."""
        self._names.remove(request.id)
        group = self._groups[request.group_id]
        group.remove(request)
        if not group:
            del self._groups[request.group_id]
