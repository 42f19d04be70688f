"""Which row of the device's tables a running request has, and what a step has to write there.

A seat is a row of tensors that stay on the device: the block table, the last drawn token, the sampling parameters. A
step sends what changed: a decoding request needs a new block every block_size steps, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from research_engine.engine.contract import Request, ScheduledRequest


@dataclass
class SeatChanges:
    """What the step's requests need written before it runs.

    Attributes:
        seats: of each row of the batch.
        cells, blocks: flat index into the block tables -> block, run parallel.
        newcomers: (seat, request) of those that took a seat in this step.
    """

    seats: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    newcomers: list[tuple[int, Request]] = field(default_factory=list)


class Seats:
    """Seats by request id. One that no step has named since others needed its seat loses it, and sits down anew.

    Args:
        num_seats: requests that one step may hold.
        width: blocks that one request may hold.
    """

    def __init__(self, num_seats: int, width: int) -> None:
        self.num_seats, self.width = num_seats, width
        self._seat_of: dict[str, int] = {}
        self._known: list[int] = [0] * num_seats  # table entries that are up to date
        self._free = list(range(num_seats - 1, -1, -1))

    def update(self, rows: Sequence[ScheduledRequest]) -> SeatChanges:
        """Mutates: seats the rows' requests; returns where they sit and what their tables lack.

        Raises:
            ValueError: more rows than seats, or a request holds more blocks than a table has entries.
        """
        changes, seat_of, known, width = SeatChanges(), self._seat_of, self._known, self.width
        seats, cells, values = changes.seats, changes.cells, changes.blocks
        for request, _, _, _, changed in rows:
            seat = seat_of.get(request._id)
            if seat is None or changed == 0:  # new, or back under an id that another one had
                seat = self._sit_down(request, rows) if seat is None else seat
                changes.newcomers.append((seat, request))
                known[seat] = 0
            blocks, have = request._block_ids, known[seat]
            need = len(blocks)
            if have < need or changed < need:
                have = min(have, changed)
                if need > width:
                    raise ValueError(f"request {request.id!r} holds {need} blocks; its table has {width} entries")
                cells += range(seat * width + have, seat * width + need)
                values += blocks[have:]
                known[seat] = need
            seats.append(seat)
        return changes

    def _sit_down(self, request: Request, rows: Sequence[ScheduledRequest]) -> int:
        if not self._free:
            present = {row.request.id for row in rows}
            for name in [name for name in self._seat_of if name not in present]:
                self._free.append(self._seat_of.pop(name))
        if not self._free:
            raise ValueError(f"{len(rows)} requests in one step; the executor has {self.num_seats} seats")
        seat = self._seat_of[request.id] = self._free.pop()
        return seat
