"""Waiting requests kept in order from event to event, so that no step has to sort ten thousand of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from research_engine.engine.contract import Request

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord

Rank = tuple[Any, ...]


class KeptQueue:
    """Follows a scheduler's three events; an arrival, admission or preemption costs O(log n) and a move of memory.

    Args:
        rank: sort key of a waiting request, unique (end it with `request.index`); must not change while it waits,
            unless `reorder` is called.
        shelf: requests of different shelves (clients, say) are kept apart; one shelf by default.
    """

    def __init__(self, rank: Callable[[Request], Rank], shelf: Callable[[Request], Any] = lambda request: None) -> None:
        self._rank = rank
        self._shelf = shelf
        self._live: dict[str, Request] = {}
        self._entries: dict[str, tuple[Rank, Request]] = {}  # of those that wait
        self.shelves: dict[Any, list[tuple[Rank, Request]]] = {}  # only shelves on which somebody waits

    def waiting(self, shelf: Any = None) -> Sequence[tuple[Rank, Request]]:
        """(rank, request) in order; treat as read-only."""
        return self.shelves.get(shelf, ())

    def arrive(self, request: Request) -> None:
        self._live[request.id] = request
        self._enter(request)

    def finish(self, request: Request) -> None:
        del self._live[request.id]
        self._leave(request)

    def settle(self, record: StepRecord) -> None:
        """Take out who was admitted in the step, put back who was preempted.

        The status decides: a record may name a request that ended in the meantime and whose id lives again.
        """
        for name, *_ in record.preemptions:
            request = self._live.get(name)
            if request is not None and not request.is_running and name not in self._entries:
                self._enter(request)
        for name in self._entries.keys() & set(record.request_ids):
            if self._live[name].is_running:
                self._leave(self._live[name])

    def reorder(self, request: Request) -> None:
        """Call it after a waiting request's rank has changed; any other request is left alone."""
        if request.id in self._entries:
            self._leave(request)
            self._enter(request)

    def _enter(self, request: Request) -> None:
        rank = self._rank(request)
        wrong = "" if isinstance(rank, tuple) else "no tuple"
        if not wrong:
            entry = self._entries[request.id] = (rank, request)
            try:
                insort(self.shelves.setdefault(self._shelf(request), []), entry)
            except TypeError as error:
                wrong = str(error)
        if wrong:
            rule = "a tuple that can be compared with any other request's, and unique: end it with request.index"
            raise TypeError(f"rank of request {request.id!r} is {rank!r}; it must be {rule} ({wrong})")

    def _leave(self, request: Request) -> None:
        entry = self._entries.pop(request.id, None)
        if entry is None:
            return
        key = self._shelf(request)
        shelf = self.shelves[key]
        del shelf[bisect_left(shelf, entry)]
        if not shelf:
            del self.shelves[key]
